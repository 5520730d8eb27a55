"""The engine against `transformers.generate` and against itself: cached or not, alone or in company, same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from backends.engine.config import EngineConfig, KVConfig
from backends.engine.engine import Engine
from backends.engine.load import load
from backends.engine.sequence import SamplingParams
from tests.engine.running import compute

BLOCK = 32
SYSTEM = "You are a careful assistant who answers in one short sentence. " * 18
QUESTIONS = [
    "What is the capital of France?",
    "How many legs does a spider have?",
    "Name a fruit.",
    "Translate 'good morning' to Spanish.",
    "Who wrote Hamlet?",
    "What is 12 times 12?",
    "Is water wet?",
    "Tell me a joke about cats.",
    "Why is the sky blue?",
    "List three colours.",
]


class Bench:
    """An engine and the model's own generate on the same weights."""

    def __init__(self, folder: Path, dtype: str) -> None:
        from transformers import AutoModelForCausalLM

        config = EngineConfig(model=str(folder), dtype=dtype, block=BLOCK, kv=KVConfig(device="512MiB"))  # type: ignore[arg-type]
        thread = ThreadPoolExecutor(1)
        self.loaded = thread.submit(load, config, folder, lambda line: None).result()
        self.engine = Engine(self.loaded, config, thread=thread)
        self.engine.start()
        self.reference: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    def chat(self, question: str, system: str = SYSTEM) -> list[int]:
        return self.loaded.text.encode_chat(
            [{"role": "system", "content": system}, {"role": "user", "content": question}]
        )

    def forget(self) -> None:
        self.engine.call(self.engine.cache.pool.drop_cached).result(10)

    def run(self, prompts: list[list[int]], tokens: int = 24, **sampling: Any) -> tuple[list[list[int]], list[int]]:
        """Output tokens of prompts that are submitted together, and how many tokens of each were cached."""
        params = SamplingParams(tokens, **{"temperature": 0.0, **sampling})
        outcome = compute(self.engine, prompts, params, self.loaded.eos)
        self.check()
        return outcome

    def check(self) -> None:
        """The accounts add up once everything has ended."""

        def look() -> None:
            self.engine.cache.pool.check_integrity()
            assert self.engine.cache.pool.available == self.engine.cache.pool.total, "a block is still held"

        self.engine.call(look).result(10)

    def generate(self, prompt: list[int], tokens: int = 24) -> list[int]:
        with torch.inference_mode():
            ids = torch.tensor([prompt])
            out = self.reference.generate(
                ids, max_new_tokens=tokens, do_sample=False, attention_mask=torch.ones_like(ids)
            )
        return [int(token) for token in out[0, len(prompt) :]]


@pytest.fixture(scope="module")
def exact(model_folder: Path) -> Iterator[Bench]:
    bench = Bench(model_folder, "float32")
    yield bench
    bench.engine.stop()


@pytest.fixture(scope="module")
def quick(model_folder: Path) -> Iterator[Bench]:
    bench = Bench(model_folder, "bfloat16")
    yield bench
    bench.engine.stop()


@pytest.mark.parametrize("question", QUESTIONS)
def test_greedy_text_equals_generate_with_and_without_a_prefix_hit(exact: Bench, question: str) -> None:
    prompt = exact.chat(question)
    expected = exact.generate(prompt)
    exact.forget()
    (cold,), (none,) = exact.run([prompt])
    (warm,), (cached,) = exact.run([prompt])
    assert none == 0 and cached == (len(prompt) - 1) // BLOCK * BLOCK > 200
    assert cold == expected
    assert warm == expected


@pytest.mark.parametrize(
    "length", [BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK - 1, 4 * BLOCK, 4 * BLOCK + 1, 256, 257, 512, 513]
)
def test_lengths_around_a_block_and_a_span(exact: Bench, length: int) -> None:
    prompt = exact.chat(QUESTIONS[8], SYSTEM * 3)[:length]
    assert len(prompt) == length
    expected = exact.generate(prompt, 8)
    exact.forget()
    for cached in (0, (length - 1) // BLOCK * BLOCK):
        (output,), (found,) = exact.run([prompt], 8)
        assert (output, found) == (expected, cached)


@pytest.mark.parametrize("dtype", ["exact", "quick"])
def test_eight_at_once_give_the_same_text_as_one_by_one(dtype: str, request: pytest.FixtureRequest) -> None:
    bench: Bench = request.getfixturevalue(dtype)
    prompts = [bench.chat(question) for question in QUESTIONS[:8]]
    bench.forget()
    alone = [bench.run([prompt])[0][0] for prompt in prompts]
    bench.forget()
    together, _ = bench.run(prompts)
    assert together == alone


def test_bfloat16_gives_the_same_bits_cached_or_not(quick: Bench) -> None:
    """The claim of docs/decisions/0002: not one token differs, whatever the cut, the company or the cache."""
    prompts = [quick.chat(question, SYSTEM[: 100 * (number + 1)]) for number, question in enumerate(QUESTIONS)]
    quick.forget()
    cold, _ = quick.run(prompts, 48)
    warm, cached = quick.run(prompts, 48)
    one_by_one = [quick.run([prompt], 48)[0][0] for prompt in reversed(prompts)][::-1]
    assert cold == warm == one_by_one
    assert all(cached)


def test_the_next_turn_finds_the_generated_tokens_and_says_the_same(exact: Bench) -> None:
    first = exact.chat("Tell me about the moon.", SYSTEM)
    (reply,), _ = exact.run([first], 80, ignore_eos=True)
    turn = [*first, *reply, *exact.loaded.text.tokenizer.encode("<|im_end|>\n<|im_start|>user\nGo on.")]
    (warm,), (cached,) = exact.run([turn], 16)
    assert cached >= (len(first) + len(reply) - 1) // BLOCK * BLOCK
    exact.forget()
    (cold,), (none,) = exact.run([turn], 16)
    assert none == 0 and cold == warm


def test_a_seed_gives_the_same_text_in_any_company(exact: Bench) -> None:
    prompts = [exact.chat(question) for question in QUESTIONS[:4]]
    sampling = {"temperature": 1.0, "top_p": 0.9, "top_k": 50, "seed": 7}
    (alone,), _ = exact.run([prompts[0]], **sampling)
    together, _ = exact.run(prompts, **sampling)
    assert together[0] == alone
    (other,), _ = exact.run([prompts[0]], **{**sampling, "seed": 8})
    assert other != alone


def test_penalties_and_bias_change_what_is_said(exact: Bench) -> None:
    prompt = exact.chat("Say yes yes yes yes yes yes.")
    (plain,), _ = exact.run([prompt], 40, ignore_eos=True)
    (penalised,), _ = exact.run([prompt], 40, ignore_eos=True, frequency_penalty=2.0, presence_penalty=2.0)
    assert len(set(penalised)) > len(set(plain))
    (forced,), _ = exact.run([prompt], 5, logit_bias={1234: 100.0}, ignore_eos=True)
    assert forced == [1234] * 5


def test_when_memory_is_short_everybody_still_gets_the_same_text(model_folder: Path, exact: Bench) -> None:
    prompts = [exact.chat(f"{question} {number}", SYSTEM[:300]) for number, question in enumerate(QUESTIONS[:5])]
    alone = [exact.run([prompt], 60, ignore_eos=True)[0][0] for prompt in prompts]
    size = exact.loaded.runner.pool.data[0].nbytes
    config = EngineConfig(model=str(model_folder), dtype="float32", block=BLOCK, kv=KVConfig(device=40 * size))  # type: ignore[arg-type]
    small = object.__new__(Bench)
    small.loaded = load(config, model_folder, lambda line: None)
    small.loaded.runner.blocks = 16  # 15 blocks for five requests of 5 to 6 blocks each
    small.engine = Engine(small.loaded, config)
    small.engine.start()
    try:
        together, _ = small.run(prompts, 60, ignore_eos=True)
        assert small.engine.stats().preemptions > 0
        assert together == alone
    finally:
        small.engine.stop()
