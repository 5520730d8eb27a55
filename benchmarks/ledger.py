"""What the ledger costs a request, and how fast a year of it is read.

Needs `nginx` and `wrk` for the first part (see benchmarks/overhead.py). The second books ten million rows of a made-up
year, rolls them up, and asks what the dashboard asks.

    python -m benchmarks.ledger [--rows 10000000] [--against CHECKOUT]   # a checkout from before the ledger, say
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from benchmarks.overhead import ANSWER, NGINX, Contestant, load, process
from benchmarks.table import conditions, show
from gateway.ledger import DAY, LedgerConfig, span_of
from gateway.stores.contract import Booking, Query
from gateway.stores.sqlite_ledger import SQLiteLedger

BATCH = 20_000
RANGES = {"1 hour": 3600.0, "24 hours": DAY, "7 days": 7 * DAY, "30 days": 30 * DAY, "1 year": 365 * DAY}
TENANTS, KEYS, MODELS = 20, 3, 6
BYPASS = ', ["cache-control"] = "no-cache, no-store"'


def overhead(rounds: int, seconds: int, against: Path | None) -> None:
    """Requests/s of a pass-through with the ledger, without it, and of another checkout, in turns."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        upstream = "http://127.0.0.1:18410"
        (folder / "nginx.conf").write_text(NGINX.format(folder=folder, port=18410, answer=ANSWER))
        binary = shutil.which("nginx", path="/usr/sbin:/usr/bin") or "nginx"
        stack.enter_context(process(binary, "-c", str(folder / "nginx.conf"), ready=upstream))
        contestants = []
        wanted = [("with the ledger", "", None), ("ledger: false", "ledger: false\n", None)]
        if against is not None:
            wanted.append((f"{against.name}", "", against))
        for place, (name, extra, root) in enumerate(wanted):
            config = folder / f"{place}.yaml"
            config.write_text(
                f"data: {folder / f'data{place}'}\nbackends: {{up: {{kind: openai, url: '{upstream}/v1'}}}}\n"
                f"models: {{m: {{try: [up]}}}}\ncache: {{semantic: false}}\n{extra}"
                "prices: {m: {input: 0.25 USD/M, cached: 0.025 USD/M, output: 2 USD/M}}\n"
            )
            serve = [sys.executable, "-m", "gateway.cli", "serve", "--no-access-log", "--config", str(config)]
            if root is not None:
                serve = ["env", f"PYTHONPATH={root}", *serve]
            port = 18411 + place
            url = f"http://127.0.0.1:{port}"
            stack.enter_context(process(*serve, "--port", str(port), ready=f"{url}/health", cwd=root))
            contestants.append(Contestant(name, url, extra=BYPASS))
        rows = []
        for connections in (1, 32):
            turns: dict[str, list[tuple[float, float, float]]] = {item.name: [] for item in contestants}
            for number in range(rounds + 1):
                for item in contestants if number % 2 else reversed(contestants):
                    result = load(item, connections, seconds, folder)
                    if number:  # the first round warms up
                        turns[item.name].append(result)
            base = contestants[-1].name
            for name, runs in turns.items():
                rate, p50, p99 = (statistics.median(column) for column in zip(*runs, strict=True))
                ratios = [theirs[0] / ours[0] for ours, theirs in zip(runs, turns[base], strict=True)]
                rows.append([str(connections), name, f"{rate:,.0f}", f"{p50:.3f}", f"{p99:.2f}",
                             f"{statistics.median(ratios):.3f}"])  # fmt: skip
    note = conditions(n=f"median of {rounds} turns of {seconds} s; time: that of the last contestant is 1")
    show("Pass-through", ["connections", "contestant", "requests/s", "p50 ms", "p99 ms", "× time"], rows, note)


def bookings(count: int, now: float) -> Iterator[list[Booking]]:
    """A year of made-up rows, in the order of time."""
    draw, made = random.Random(1), 0
    tiers, weights = ["exact", "semantic", "miss", "bypass"], [30, 15, 50, 5]
    while made < count:
        batch = []
        for _ in range(min(BATCH, count - made)):
            at = now - 365 * DAY * (1 - made / count)
            cache = draw.choices(tiers, weights)[0]
            tenant, hit = min(int(draw.expovariate(0.2)), TENANTS - 1), cache in ("exact", "semantic")
            batch.append(
                Booking(
                    at, f"tenant-{tenant}", request=f"{made:032x}", key=f"key-{draw.randrange(KEYS)}",
                    surface="openai-chat", asked="m", model=f"model-{draw.randrange(MODELS)}", backend="up",
                    cache=cache, reason="" if hit else "below-threshold", stored="" if hit else "stored",
                    entry=f"{draw.randrange(5000):064x}" if hit else "", status=200,
                    ttft=draw.lognormvariate(-6 if hit else -1, 0.7), seconds=1.0,
                    prompt=0 if hit else 500, completion=0 if hit else 100, cost=0 if hit else 325_000,
                    saved_answer=325_000 if hit else 0, avoided_prompt=500 if hit else 0,
                )
            )  # fmt: skip
            made += 1
        yield batch


def queries(count: int) -> None:
    """How long the dashboard's questions take on a year of rows."""
    with tempfile.TemporaryDirectory(dir=Path.home()) as scratch:
        path, now, keep = Path(scratch) / "ledger.sqlite", time.time(), LedgerConfig()
        store = SQLiteLedger(path, keep.keep())
        began = time.monotonic()
        for number, batch in enumerate(bookings(count, now)):
            store.add(batch)
            if number % 50 == 49:
                store.tidy(batch[-1].at)
                if sys.stderr.isatty():
                    print(f"\r{(number + 1) * BATCH:,}", end="", file=sys.stderr)
        store.tidy(now)
        took = time.monotonic() - began
        size = path.stat().st_size
        rows = []
        for name, length in RANGES.items():
            span = span_of(now - length, now, now, keep)

            def part(*by: str, start: float = now - length, span: int = span) -> Query:
                return Query(start, now, span, "", by)

            asked = {
                "all": lambda part=part: store.totals(part()),
                "by time, tier": lambda part=part: store.totals(part("time", "cache")),
                "by tenant": lambda part=part: store.totals(part("tenant")),
                "by model": lambda part=part: store.totals(part("model")),
                "quantiles by time": lambda part=part: store.quantiles(part("time")),
                "entries": lambda part=part: store.entries(part(), 10),
                "rows": lambda: store.rows("", 0, 0, 30, {}),
            }
            for question, ask in asked.items():
                times = []
                for _ in range(7):
                    start = time.perf_counter()
                    ask()
                    times.append(1000 * (time.perf_counter() - start))
                rows.append([name, question, f"{statistics.median(times):.1f}", f"{max(times):.1f}"])
        store.close()
    booked = f"{count:,} rows booked in {took:.0f} s ({count / took:,.0f} a second), file {size / 2**20:,.0f} MiB"
    note = conditions(n=f"median of 7; {booked}")
    show("A year of the ledger", ["range", "question", "ms", "slowest"], rows, note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--seconds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--against", type=Path)
    arguments = parser.parse_args()
    if arguments.rounds:
        overhead(arguments.rounds, arguments.seconds, arguments.against)
    if arguments.rows:
        queries(arguments.rows)


if __name__ == "__main__":
    main()
