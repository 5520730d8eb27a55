"""What prefix reuse gains: 100 questions behind one 500-token system prompt, one at a time and 8 at once, on and off.

Two gateways with the real engine, one with its prefix cache on and one with it off, take turns (so that both meet the
same noise); answer caching is bypassed, output is 16 tokens, greedy. TTFT is the time to the first content event seen
by the client.

    python -m benchmarks.shared_prefix [--questions 100] [--dtype auto]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from backends.engine.models import resolve
from benchmarks.overhead import process
from benchmarks.table import conditions, show
from gateway.config import DEFAULT_MODEL, Settings

SENTENCE = "You are the support assistant of a shop that sells bicycles, and you answer briefly and politely. "
OUTPUT_TOKENS = 16


@dataclass
class Tally:
    """What was measured of one way to run."""

    ttft: list[float] = field(default_factory=list)
    seconds: float = 0.0
    prompt: int = 0
    cached: int = 0
    completion: int = 0


async def ask(
    session: aiohttp.ClientSession, url: str, system: str, question: str, tally: Tally, plain: str = ""
) -> None:
    """One streamed question. `plain` names the model for a server that knows no more than the oldest fields: then the
    events with content are counted as tokens, and an answer may end early."""
    body: dict[str, Any] = {
        "model": plain or "m",
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": question}],
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "stream": True,
    }
    if not plain:
        body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
    started, first = time.perf_counter(), None
    headers = {"cache-control": "no-cache, no-store"}
    async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
        response.raise_for_status()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            content = bool(chunk["choices"] and chunk["choices"][0]["delta"].get("content"))
            tally.completion += content and bool(plain)
            if first is None and content:
                first = time.perf_counter() - started
                tally.ttft.append(first)
            if chunk.get("usage"):
                tally.prompt += chunk["usage"]["prompt_tokens"]
                tally.completion += chunk["usage"]["completion_tokens"]
                tally.cached += (chunk["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)


async def turn(url: str, system: str, questions: list[str], at_once: int, tally: Tally, plain: str = "") -> None:
    """Ask all questions, `at_once` at a time."""
    started = time.perf_counter()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        for start in range(0, len(questions), at_once):
            await asyncio.gather(
                *(ask(session, url, system, q, tally, plain) for q in questions[start : start + at_once])
            )
    tally.seconds += time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--dtype", default="auto")
    arguments = parser.parse_args()
    folder_of_model = resolve(DEFAULT_MODEL, Settings().data, lambda line: print(line, file=sys.stderr))
    from backends.engine.text import Text

    text = Text(folder_of_model)
    system = SENTENCE
    while len(text.tokenizer.encode(system + SENTENCE)) <= 500:
        system += SENTENCE
    tallies = {(at_once, mode): Tally() for at_once in (1, 8) for mode in ("off", "on")}
    with ExitStack() as stack:
        urls = {}
        for mode, port in (("off", 18410), ("on", 18411)):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            engine = f"{{kind: engine, model: '{folder_of_model}', dtype: {arguments.dtype}, prefix_cache: {mode}}}"
            (folder / "hitherto.yaml").write_text(
                f"data: {folder / 'data'}\ncache: {{semantic: false}}\nmodels: {{m: {{try: [local]}}}}\n"
                f"backends: {{local: {engine}}}\n"
            )
            serve = [sys.executable, "-m", "gateway.cli", "serve", "--no-access-log", "--config"]
            serve.append(str(folder / "hitherto.yaml"))
            urls[mode] = f"http://127.0.0.1:{port}"
            stack.enter_context(process(*serve, "--port", str(port), ready=f"{urls[mode]}/health"))
        for url in urls.values():
            asyncio.run(_until_ready(url))
            asyncio.run(turn(url, "Warm up.", ["Hello"] * 2, 2, Tally()))
        batch = 20
        for at_once in (1, 8):
            for start in range(0, arguments.questions, batch):
                questions = [
                    f"{at_once}.{number}: does order number {number * 37} come with a bell?"
                    for number in range(start, min(start + batch, arguments.questions))
                ]
                for mode in ("off", "on"):
                    asyncio.run(turn(urls[mode], system, questions, at_once, tallies[at_once, mode]))
    rows = []
    for (at_once, mode), tally in tallies.items():
        base = statistics.median(tallies[at_once, "off"].ttft)
        ordered = sorted(tally.ttft)
        p50, p90 = statistics.median(ordered), ordered[int(0.9 * (len(ordered) - 1))]
        rows.append([
            str(at_once), mode, f"{p50 * 1000:.0f}", f"{p90 * 1000:.0f}", f"{p50 / base:.2f}", f"{tally.seconds:.1f}",
            f"{tally.completion / tally.seconds:.0f}", f"{(tally.prompt + tally.completion) / tally.seconds:.0f}",
            f"{tally.cached / tally.prompt:.0%}",
        ])  # fmt: skip
    headings = [
        "at once",
        "prefix cache",
        "TTFT p50 ms",
        "p90 ms",
        "× off",
        "total s",
        "output tokens/s",
        "all tokens/s",
        "cached",
    ]
    note = f"SmolLM2-135M, dtype {arguments.dtype}, {len(text.tokenizer.encode(system))}-token system prompt"
    show("Shared prefix", headings, rows, conditions(n=f"{arguments.questions} questions each way", what=note))


async def _until_ready(url: str) -> None:
    async with aiohttp.ClientSession() as session:
        for _ in range(600):
            async with session.get(f"{url}/ready") as response:
                if response.status == 200:
                    return
            await asyncio.sleep(0.1)
    raise TimeoutError(f"{url} is not ready")


if __name__ == "__main__":
    main()
