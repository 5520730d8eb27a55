"""Other architectures, tiny and random: what the engine takes must be right, and what it cannot do it must refuse."""

from __future__ import annotations

import random
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from backends.engine.config import EngineConfig, KVConfig
from backends.engine.engine import Engine
from backends.engine.load import load
from backends.engine.sequence import Emission, SamplingParams, Sequence
from backends.engine.verify import UnsupportedModel
from tests.conftest import eventually
from tests.engine.running import compute

SMALL = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}
WINDOW = {"sliding_window": 48}
MOE = {"num_experts_per_tok": 2, "num_local_experts": 4}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, **WINDOW}
SUPPORTED: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": WINDOW,
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "gemma2": {**GEMMA, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 30.0},
    "gemma3_text": GEMMA,
    "gpt_oss": {**MOE, **WINDOW, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"] * 2,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "num_hidden_layers": 4},
    "olmo2": {},
    "granite": {},
    "starcoder2": {},
    "mixtral": MOE,
    "qwen3_moe": {"head_dim": 16, "num_experts": 4, "moe_intermediate_size": 32, **MOE},
    "cohere2": {**WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "gpt_neox": {"num_key_value_heads": None},
    "smollm3": {},
    "exaone4": {**WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
}  # fmt: skip
WITH_STATE: dict[str, dict[str, Any]] = {
    "qwen3_next": {"head_dim": 16, "num_hidden_layers": 4, "num_experts": 4, "moe_intermediate_size": 32, **MOE,
                   "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
                   "linear_value_head_dim": 16, "shared_expert_intermediate_size": 32},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
}  # fmt: skip


def build(kind: str, extra: dict[str, Any], model_folder: Path, folder: Path) -> Path:
    """A random model of a kind, with a tokenizer that nobody asks anything."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    config = AutoConfig.for_model(kind, **{**SMALL, **extra})
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or name.endswith("sinks"):
                parameter.normal_(
                    0.0, 2.0 if name.endswith("sinks") else 0.15
                )  # or every distribution would be flat, and every difference small
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(model_folder / name, folder / name)
    return folder


def start(folder: Path, **settings: Any) -> tuple[Engine, ThreadPoolExecutor]:
    thread = ThreadPoolExecutor(1)
    config = EngineConfig(model=str(folder), dtype="float32", kv=KVConfig(device=16 << 20), **settings)  # type: ignore[arg-type]
    loaded = thread.submit(load, config, folder, lambda line: None).result()
    engine = Engine(loaded, config, thread=thread)
    engine.start()
    return engine, thread


def run(engine: Engine, prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], list[int]]:
    return compute(engine, prompts, SamplingParams(tokens, temperature=0.0, ignore_eos=True))


@pytest.mark.parametrize("kind", [*SUPPORTED, *WITH_STATE])
def test_the_engine_says_what_the_model_says_beyond_any_window(kind: str, model_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = build(kind, {**SUPPORTED, **WITH_STATE}[kind], model_folder, tmp_path / kind)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    chance = random.Random(kind)
    shared = [chance.randrange(3, 300) for _ in range(140)]
    prompts = [[*shared, *(chance.randrange(3, 300) for _ in range(count))] for count in (7, 30)]
    expected = []
    with torch.inference_mode():
        for prompt in prompts:
            tokens = list(prompt)
            for _ in range(12):
                tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
            expected.append(tokens[len(prompt) :])
    engine, _ = start(folder)
    try:
        cold, _ = run(engine, prompts[:1], 12)
        warm, cached = run(engine, prompts, 12)
        assert cold == expected[:1] and warm == expected and all(tokens >= 128 for tokens in cached)
    finally:
        engine.stop()


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("mamba", {"state_size": 8}),
        ("minimax", {**MOE, "head_dim": 16, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}),
    ],
)
def test_what_would_be_silently_wrong_is_refused_in_words(
    kind: str, extra: dict[str, Any], model_folder: Path, tmp_path: Path
) -> None:
    folder = build(kind, extra, model_folder, tmp_path / kind)
    with pytest.raises(UnsupportedModel):
        start(folder)


def test_a_thousand_random_requests_with_cancels_leave_nothing_behind(model_folder: Path, tmp_path: Path) -> None:
    """Cancelled while waiting, computing a prompt, decoding, and after the end; memory is short all the time."""
    shape = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 256}
    folder = build("llama", shape, model_folder, tmp_path / "llama")
    engine, _ = start(folder, max_waiting=2000, max_running=6, verify_share=0.2)
    pool = engine.cache.pool
    chance = random.Random(11)
    ended = threading.Semaphore(0)
    prompts = [[chance.randrange(3, 300) for _ in range(chance.randrange(1, 150))] for _ in range(30)]
    taken: list[int] = []

    def take() -> None:
        blocks = pool.allocate(pool.available - 16)
        assert blocks is not None
        taken.extend(blocks)

    try:
        engine.call(take).result(10)
        for number in range(1000):
            known = chance.choice(prompts)
            prompt = [*known[: chance.randrange(1, len(known) + 1)], chance.randrange(3, 300)]
            doomed = chance.random() < 0.4
            limit = chance.randrange(1, 40)
            kill_at = chance.randrange(0, limit + 1)

            sequence = Sequence(str(number), prompt, SamplingParams(limit, temperature=0.0, ignore_eos=True))
            sequence.tenant = chance.choice("abc")
            count = [0]

            def tell(
                emission: Emission,
                sequence: Sequence = sequence,
                doomed: bool = doomed,
                kill_at: int = kill_at,
                count: list[int] = count,
            ) -> None:
                assert emission.finish != "error", emission.error
                count[0] += 1
                if doomed and count[0] == kill_at:
                    engine.cancel(sequence)
                if emission.finish or (doomed and count[0] == kill_at):
                    ended.release()

            sequence.emit = tell
            engine.submit(sequence)
            if doomed and kill_at == 0:
                engine.cancel(sequence)
                ended.release()
        for _ in range(1000):
            assert ended.acquire(timeout=60)
        assert eventually(lambda: engine.scheduler.idle, 60)

        def look() -> None:
            pool.release(taken)
            pool.check_integrity()

        engine.call(look).result(10)
        assert pool.available == pool.total, "free + cached == total"
        assert engine.stats().preemptions > 0 and engine.stats().shadow_mismatches == 0
        assert engine.stats().shadow_checks > 0
    finally:
        engine.stop()
