"""The commands `hitherto doctor` and `hitherto warm`: what a running gateway knows of prefixes, and does for them."""

from __future__ import annotations

from typing import Any

from gateway.operator import ask


def warm(url: str) -> bool:
    """Warm the declared templates and print what was done; whether all went well. Raises `ConfigError`."""
    done: list[dict[str, Any]] = ask("POST", url, "/admin/prefix/warm", 600)
    for item in done:
        new = item["tokens"] - item["cached_tokens"]
        what = item["error"] or f"{item['tokens']} tokens, {new} computed in {item['seconds']:g} s"
        if not item["error"] and not item["pinned"]:
            what += "; not kept for long: templates have half of the memory already"
        print(f"{item['template']} on {item['backend']}: {what}")
    if not done:
        print("no template with warm: true, or no engine, is configured there")
    return not any(item["error"] for item in done)


def doctor(url: str) -> None:
    """Print the report. Raises `ConfigError` where no gateway answers."""
    engines: dict[str, dict[str, Any] | None] = ask("GET", url, "/admin/prefix", 10)
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
        for hot in report["hot"][:5]:
            print(f"\n  {hot['saved_tokens']:,} tokens saved, {hot['times']} times {hot['tokens']} that end with")
            print(f"    {hot['ends'][-100:]!r}")
    if not engines:
        print("no engine is configured there")


def purge(url: str) -> None:
    """Forget all prefix KV and print whose. Raises `ConfigError`."""
    purged: list[str] = ask("POST", url, "/admin/kv/purge", 60)["purged"]
    print(f"forgotten: {', '.join(purged)}" if purged else "no engine is configured there")
