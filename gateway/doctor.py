"""The command `hitherto doctor`: what a running gateway knows about prefixes that were not reused."""

from __future__ import annotations

from typing import Any

import httpx

from gateway.config import ConfigError


def run(url: str) -> None:
    """Print the report. Raises `ConfigError` where no gateway answers."""
    try:
        reply = httpx.get(f"{url.rstrip('/')}/admin/prefix", timeout=10, trust_env=False)
        reply.raise_for_status()
        engines: dict[str, dict[str, Any] | None] = reply.json()
    except (httpx.HTTPError, ValueError) as error:
        raise ConfigError(f"no gateway answers at {url}: {error}") from error
    for name, report in engines.items():
        if report is None:
            print(f"{name}: the engine does not answer")
            continue
        total, reused, lost = report["prompt_tokens"], report["reused_tokens"], report["lost_tokens"]
        share = f"{reused / total:.0%}" if total else "nothing yet"
        print(f"{name}: {total:,} prompt tokens, {reused:,} reused ({share}); small differences cost {lost:,} more")
        for finding in report["findings"]:
            print(
                f"\n  {finding['lost_tokens']:,} tokens, {finding['times']} times, from token {finding['position']} on"
            )
            print(f"    after    {finding['before'][-60:]!r}")
            for variant in finding["variants"]:
                print(f"    came     {variant[:60]!r}")
            print(f"    perhaps  {finding['reason']}")
    if not engines:
        print("no engine is configured there")
