"""The commands `hitherto cache stats`, `purge`, `explain` and `feedback`, in words."""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import quote

from gateway.operator import ask

TIMEOUT = 60.0


def stats(url: str) -> None:
    """Print what the answer cache of a running gateway holds. Raises `ConfigError`."""
    facts = ask("GET", url, "/admin/cache/stats", TIMEOUT)
    print(f"{facts['entries']:,} answers ({facts['aliases']:,} of them aliases), {facts['bytes']:,} bytes")
    print(f"{facts['indexed']:,} questions in the semantic index, {facts['denied']:,} pairs reported as wrong")
    if facts["oldest"] is not None:
        print(f"the oldest is {_age(time.time() - facts['oldest'])} old")
    for model, count in facts["models"].items():
        print(f"  {count:10,}  {model}")


def purge(url: str, conditions: dict[str, Any]) -> None:
    """Forget answers, or count them, and print how many. Raises `ConfigError`."""
    done = ask("POST", url, "/admin/cache/purge", TIMEOUT, conditions)
    verb = "would go" if done["dry_run"] else "are gone"
    print(f"{done['entries']:,} answers ({done['bytes']:,} bytes) {verb}")


def risk(url: str, tenant: str) -> None:
    """Print what is known of semantic hits, and what each `max_wrong_rate` would serve. Raises `ConfigError`."""
    for told in ask("GET", url, f"/admin/cache/risk?tenant={quote(tenant)}", TIMEOUT):
        if told["mode"] == "off":
            print(f"{told['tenant']}: the semantic tier is off")
            continue
        verb = "would be served" if told["mode"] == "shadow" else "may be served"
        print(
            f"{told['tenant']}: {told['mode']}, max_wrong_rate {told['max_wrong_rate']:.1%}, audit {told['audit']:.0%}"
        )
        seen = {True: "right", False: "wrong", None: "unsure"}
        counts = ", ".join(f"{one['count']:,} {seen[one['right']]} ({one['source']})" for one in told["observations"])
        print(f"  {told['lookups']:,} semantic lookups since the start; compared: {counts or 'nothing yet'}")
        print(f"  {'max_wrong_rate':>14}  {'limit':>7}  {verb:>16}  {'compared':>8}  {'wrong':>5}  95 % interval")
        for row in told["rates"]:
            limit = "none" if row["limit"] is None else f"{row['limit']:.2f}"
            low, high = row["wrong_rate"]
            between = f"{low:.1%} to {high:.1%}" if row["compared"] else "nothing known"
            mark = "* " if row["in_force"] else "  "
            print(f"{mark}{row['max_wrong_rate']:>14.1%}  {limit:>7}  {row['served']:>16.1%}  "
                  f"{row['compared']:>8}  {row['wrong']:>5}  {between}")  # fmt: skip


def feedback(url: str, entry: str, question: str | None) -> None:
    """Report a wrong answer. Raises `ConfigError`."""
    done = ask("POST", url, "/admin/cache/feedback", TIMEOUT, {"entry": entry, "question": question})
    print(f"entry {done['entry']} " + ("is gone" if done["removed"] else "is never given to that question again"))


def explain(url: str, request: dict[str, Any], headers: dict[str, str]) -> None:
    """Print why a request would hit or miss. Raises `ConfigError`."""
    told = ask("POST", url, "/admin/explain", TIMEOUT, {"request": request, "headers": headers})
    print(f"{told['outcome']}" + (f": {told['reason']}" if told["reason"] else ""))
    print(f"  key {told['key']} in scope {told['scope']}; an answer would live {_age(told['would_live'])}" + (
        f" (volatile: {told['volatile']})" if told["volatile"] else ""))  # fmt: skip
    if told["no_question"]:
        print(f"  no semantic tier: {told['no_question']}")
    if entry := told["entry"]:
        print(f"  entry {entry['entry']}, {_age(entry['age'])} old: {entry['question']!r}")
    for near in told["nearest"]:
        verdict = near["refused"] or "would be served"
        score = "" if near["score"] is None else f"{near['score']:+.2f}"
        if near["limit"] is not None:
            score += f" of {near['limit']:+.2f}"
        print(f"  {near['similarity']:.4f}  {score:16}  {verdict:20}  {near['question']!r}")
    for other in told["elsewhere"]:
        differs = ", ".join(other["differs"]) or "nothing that was noted"
        print(f"  the same question, {_age(other['age'])} ago, differs in: {differs}")


def _age(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"
