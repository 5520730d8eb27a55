"""The commands `hitherto report`, `price`, `tenants`, `breakers`, `reload` and `audit`: tables of a running gateway."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any
from urllib.parse import urlencode

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from backends.protocol import parse_duration
from gateway.operator import ask, text_of
from gateway.settings_file import ConfigError

TIMEOUT = 60.0
_KEY = {"time": "start"}


def report(url: str, by: str, since: str, until: str | None, tenant: str, form: str) -> None:
    """Print what was spent and saved, by group. Raises `ConfigError`."""
    start, end = _moment(since), None if until is None else _moment(until)
    # The finer the steps, the nearer to what was asked for, as far back as they are kept.
    kept = ask("GET", url, "/dashboard/api/me", TIMEOUT).get("keep", {}).get("hours", 0.0)
    recent = time.time() - start < kept - 3600 and "time" not in by
    asked = {"from": start, "to": end, "by": by, "tenant": tenant, "step": 3600 if recent else None}
    told = {name: value for name, value in asked.items() if value is not None and value != ""}
    path = f"/dashboard/api/totals?{urlencode(told)}"
    if form == "csv":
        print(text_of(url, f"{path}&format=csv", TIMEOUT), end="")
        return
    answer = ask("GET", url, path, TIMEOUT)
    if not isinstance(answer, dict) or "rows" not in answer:
        raise ConfigError(f"what answers at {url} is no Hitherto gateway")
    if form == "json":
        print(json.dumps(answer, indent=1))
        return
    names = [name for name in by.split(",") if name]
    rows = answer["rows"]
    figures = ["requests", "hits", "spent", "saved", "share", "without", "paid", "avoided"]
    table = _table([*names, *figures], len(names))
    hits = _hits(url, told, names)
    for row in sorted(rows, key=lambda row: row["start"] if "time" in names else -row["cold"]):
        saved, group = row["cold"] - row["cost"], [_name(row, name) for name in names]
        found = None if hits is None else hits.get(tuple(row[_KEY.get(name, name)] for name in names), 0)
        table.add_row(
            *group, f"{row['requests']:,}",
            "" if found is None else _share(found, row["requests"]), usd(row["cost"]), usd(saved),
            _share(saved, row["cold"]), usd(row["cold"]), _short(row["prompt"] + row["completion"]),
            _short(row["avoided_prompt"] + row["avoided_completion"]),
        )  # fmt: skip
    total, cold = sum(row["cost"] for row in rows), sum(row["cold"] for row in rows)
    first, last = (datetime.fromtimestamp(answer[name]).strftime("%Y-%m-%d %H:%M") for name in ("from", "to"))
    console = Console()
    console.print(table)
    console.print("paid and avoided are tokens", style="dim")
    console.print(f"{first} to {last}: {usd(total)} spent instead of {usd(cold)}, {usd(cold - total)} saved")
    if guessed := sum(row["estimated"] for row in rows):
        console.print(f"{guessed:,} rows are guessed: their answers were given up or broke off before they told usage")
    if unpriced := sum(row["unpriced"] for row in rows):
        console.print(f"{unpriced:,} rows have no price; give their models one under prices: in hitherto.yaml")


def _hits(url: str, told: dict[str, Any], names: Sequence[str]) -> dict[tuple[Any, ...], int] | None:
    """Requests that got a stored answer, by group; None where the group says it."""
    if "cache" in names:
        return None
    by = ",".join([*names, "cache"])
    found: dict[tuple[Any, ...], int] = {}
    try:
        rows = ask("GET", url, f"/dashboard/api/totals?{urlencode({**told, 'by': by})}", TIMEOUT)["rows"]
    except ConfigError:  # too many groups: the column stays empty
        return None
    for row in rows:
        if row["cache"] in ("exact", "semantic", "alias", "stale"):
            group = tuple(row[_KEY.get(name, name)] for name in names)
            found[group] = found.get(group, 0) + row["requests"]
    return found


def price(url: str, models: Sequence[str]) -> bool:
    """Print what models cost; whether all have a price. Raises `ConfigError`."""
    found = ask("GET", url, f"/admin/prices?{urlencode({'model': models}, doseq=True)}", TIMEOUT)
    table = _table(["model", "priced as", "input", "cached", "written", "output", "hour", "from"], 2)
    for name, told in found.items():
        if told is None:
            table.add_row(name, "no price", *[""] * 6)
            continue
        kinds = ("input", "cached", "written", "output")
        rates = ["–" if told[kind] is None else f"${told[kind]:g}/M" for kind in kinds]
        hour = f"${told['hour']:g}" if told["hour"] else "–"
        table.add_row(name, told["model"], *rates, hour, "prices:" if told["own"] else "the table")
    Console().print(table)
    return all(told is not None for told in found.values())


def tenants(url: str) -> None:
    """Print tenants, their keys and budgets. Raises `ConfigError`."""
    told = ask("GET", url, "/admin/tenants", TIMEOUT)
    table = _table(["tenant", "keys", "models", "budget", "file"], 5)
    for one in told["tenants"]:
        budget = ", ".join(f"{part['period']}: {usd(part['spent'])} of {usd(part['limit'])}" for part in one["budget"])
        keys = ", ".join(f"{key['id']} {key['name']}".strip() for key in one["keys"])
        table.add_row(one["tenant"], keys, ", ".join(one["models"]), budget or "–", one["file"])
    Console().print(table)
    for text in told["wrong"].values():
        print(f"not in force: {text}", file=sys.stderr)


def breakers(url: str) -> None:
    """Print how each place stands. Raises `ConfigError`."""
    table = _table(["place", "state", "asked again in", "in flight", "first byte", "last failure"], 2)
    for one in ask("GET", url, "/admin/breakers", TIMEOUT):
        pace, again = one["first_byte_seconds"], one["opens_again_in"]
        table.add_row(one["place"], one["state"], f"{again:g} s" if again else "–", str(one["in_flight"]),
                      "–" if pace is None else f"{1000 * pace:.0f} ms", one["last_failure"] or "–")  # fmt: skip
    Console().print(table)


def reload(url: str) -> bool:
    """Have the tenants' files read now, print what changed; whether all of them are in force. Raises `ConfigError`."""
    told = ask("POST", url, "/admin/reload", TIMEOUT)
    for line in told["changes"] or ["nothing has changed"]:
        print(line)
    for text in told["wrong"].values():
        print(f"not in force: {text}")
    return not told["wrong"]


def audit(url: str, limit: int) -> None:
    """Print who changed what, newest first. Raises `ConfigError`."""
    table = _table(["time", "who", "what", "detail", "outcome"], 5)
    for one in ask("GET", url, f"/admin/audit?limit={limit}", TIMEOUT):
        when = datetime.fromtimestamp(one["at"]).strftime("%Y-%m-%d %H:%M:%S")
        table.add_row(when, one["actor"], one["action"], one["detail"], one["outcome"])
    Console().print(table)


def usd(amount: float) -> str:
    """Dollars, with as many digits as tell something."""
    size = abs(amount)
    if size >= 1000:
        return f"${amount:,.0f}"
    return f"${amount:,.2f}" if size >= 1 or not size else f"${amount:.4f}" if size >= 0.01 else f"${amount:.6f}"


def _short(tokens: int) -> str:
    """Tokens, in thousands or millions where there are many."""
    return f"{tokens / 1e6:.1f}M" if tokens >= 1e6 else f"{tokens / 1e3:.1f}K" if tokens >= 1e4 else f"{tokens:,}"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "–"


def _name(row: dict[str, Any], name: str) -> str:
    if name == "time":
        return datetime.fromtimestamp(row["start"]).strftime("%Y-%m-%d %H:%M")
    return str(row[name]) or "none"


class _Table(Table):
    """One whose cells are text, never markup, and never speak to the terminal: callers choose what some say."""

    def add_row(self, *cells: Any, **options: Any) -> None:
        super().add_row(*(Text("".join(c if c.isprintable() else "�" for c in cell)) for cell in cells), **options)


def _table(names: Sequence[str], texts: int) -> _Table:
    """An empty one; the first `texts` columns are text, the others numbers."""
    table = _Table(header_style="bold", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for place, name in enumerate(names):
        text = place < texts
        table.add_column(
            name, justify="left" if text else "right", overflow="fold", no_wrap=not text, min_width=9 if text else None
        )
    return table


def _moment(text: str) -> float:
    """`7d` ago, or a date and time (local): seconds since the epoch. Raises `ConfigError`."""
    try:
        seconds = parse_duration(text)
        assert isinstance(seconds, float)
        return time.time() - seconds
    except ValueError:
        pass
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise ConfigError(f"{text!r} is neither a time span like 7d nor a date like 2026-11-30") from None
