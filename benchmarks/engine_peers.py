"""Our engine against others on the same model, prompts and machine: servers that already run take turns.

    hitherto engine --model FOLDER --name m --listen 127.0.0.1:18600
    vllm serve FOLDER --served-model-name m --port 18601 …           (see docs/performance.md for the recipe)
    python -m benchmarks.engine_peers ours=http://127.0.0.1:18600 vllm=http://127.0.0.1:18601

`NAME=URL,MODEL` is for servers that know only the oldest fields, like `transformers serve`. The first server named is
the yardstick. Each round asks behind a system prompt that nobody has seen: once cold, then
hits alone, then eight at once. 16 output tokens, greedy, streamed.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections import defaultdict

import aiohttp

from benchmarks.shared_prefix import SENTENCE, Tally, ask, turn
from benchmarks.table import conditions, show

HITS, AT_ONCE, PAUSE = 4, 8, 2.0


async def first_token(url: str, system: str, question: str, plain: str) -> float:
    """Milliseconds to the first token of one request."""
    tally = Tally()
    async with aiohttp.ClientSession() as session:
        await ask(session, url, system, question, tally, plain)
    return tally.ttft[0] * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", help="NAME=URL or NAME=URL,MODEL")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--note", default="", help="What should be said about the servers.")
    arguments = parser.parse_args()
    servers = dict(item.split("=", 1) for item in arguments.servers)
    cold, hit, crowd = (defaultdict[str, list[float]](list) for _ in range(3))
    rates: dict[str, list[float]] = defaultdict(list)
    for number in range(arguments.rounds + 1):
        for name, where in servers.items():
            url, _, plain = where.partition(",")
            time.sleep(PAUSE)  # some servers spin for a while after their last request
            system = f"Shop {time.time_ns()}. " + SENTENCE * 24
            seen = asyncio.run(first_token(url, system, "Do you sell bells?", plain))
            hits = [
                asyncio.run(first_token(url, system, f"Is frame {index} in stock?", plain)) for index in range(HITS)
            ]
            tally = Tally()
            questions = [f"Does order {number}-{index} come with lights?" for index in range(AT_ONCE)]
            asyncio.run(turn(url, system, questions, AT_ONCE, tally, plain))
            if number:  # the first round warms up
                cold[name].append(seen)
                hit[name] += hits
                crowd[name] += [seconds * 1000 for seconds in tally.ttft]
                rates[name].append(tally.completion / tally.seconds)
    yardstick = next(iter(servers))
    rows = []
    for name in servers:
        values = [statistics.median(measured[name]) for measured in (cold, hit, crowd, rates)]
        base = [statistics.median(measured[yardstick]) for measured in (cold, hit, crowd, rates)]
        ratios = [f"{base[1] / values[1]:.2f}", f"{base[3] / values[3]:.2f}"]
        rows.append([name, *(f"{value:.0f}" for value in values), *ratios])
    headings = ["engine", "TTFT cold ms", "TTFT hit ms", "TTFT hit, 8 at once", "output tok/s, 8 at once"]
    headings += [f"TTFT hit: {yardstick} / this", f"tok/s: {yardstick} / this"]
    show("Engines", headings, rows, conditions(n=f"median of {arguments.rounds} rounds", what=arguments.note))


if __name__ == "__main__":
    main()
