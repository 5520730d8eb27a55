"""From a model folder to a tested runner: dtype and device, weights, KV pool, self-test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from backends.engine import attention, models, packing, verify
from backends.engine.config import EngineConfig
from backends.engine.kernels import PERIOD
from backends.engine.kv_pool import KVPool, block_bytes
from backends.engine.prefix_cache import root_key
from backends.engine.runner import Runner
from backends.engine.text import Text
from backends.engine.tiers.int8 import Int8


@dataclass(frozen=True)
class Loaded:
    """Everything about one model that the engine needs."""

    runner: Runner
    text: Text
    root: bytes
    eos: frozenset[int]
    context: int
    vocabulary: int
    """Rows of the embedding: token ids must be below."""
    dtype: str
    self_test_difference: float
    codec: Int8
    """Of this model's blocks, should they be wanted smaller."""


def load(config: EngineConfig, data: Path, say: Callable[[str], None], epoch: int = 0) -> Loaded:
    """Load, reserve, test. KV of another `epoch` is not found again.

    Raises `ModelNotFound`, `UnsupportedModel` or ValueError with a line for the operator.
    """
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.utils import logging

    if config.threads:
        torch.set_num_threads(config.threads)
    logging.disable_progress_bar()
    folder = models.resolve(config.model, data, say)
    device = _device(config.device)
    dtype = _dtype(config.dtype, device)
    say(f"loading {folder.name} as {str(dtype).removeprefix('torch.')} on {device.type}")
    AttentionInterface.register(attention.NAME, attention.paged_attention)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    model = model.to(device).eval()
    verify.gate(model.config)
    text = Text(folder)
    prompt = _test_prompt(model.config.vocab_size, PERIOD + config.block // 2)
    with torch.inference_mode():
        ids = torch.tensor([prompt], device=device)
        reference = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0].float()
    pool = _pool(config, model.config, dtype, device)
    model.set_attn_implementation(attention.NAME)
    if device.type == "cpu":
        packing.pack(model)
    runner = Runner(model, pool)
    needed = verify.scratch_blocks(len(prompt), pool) + 1
    if pool.blocks < needed:
        size = needed * _block_bytes(config, model.config, dtype)
        raise ValueError(f"kv.device: {config.kv.device} bytes are too few for this model; it needs {size} at least")
    difference = verify.self_test(runner, reference, prompt, dtype)
    pool.data.zero_()
    identity = {
        "schema": "2",
        "weights": models.fingerprint(folder),
        "dtype": str(dtype),
        "block": str(config.block),
        "codec": "int8" if config.kv.int8 else "raw",
        "epoch": str(epoch),
        "device": device.type,
        # Other kernels give other bits, and a shared tier may be filled by another machine.
        "kernels": torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    eos = model.generation_config.eos_token_id
    eos_ids = {eos} if isinstance(eos, int) else set(eos or ())
    if text.tokenizer.eos_token_id is not None:
        eos_ids.add(text.tokenizer.eos_token_id)
    context = int(getattr(model.config, "max_position_embeddings", 0) or 4096)
    say(
        f"ready: {pool.blocks - 1} KV blocks of {config.block} tokens, context {context}, "
        f"self-test difference {difference:.2g}"
    )
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    name = str(dtype).removeprefix("torch.")
    codec = Int8(pool.layers, pool.kv_heads, pool.block_size, pool.head_dim, name)
    return Loaded(runner, text, root_key(identity), frozenset(eos_ids), context, vocabulary, name, difference, codec)


def _device(wanted: str) -> torch.device:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: cuda is asked for, but torch sees no GPU")
    return torch.device("cuda" if wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available()) else "cpu")


def _dtype(wanted: str, device: torch.device) -> torch.dtype:
    if wanted != "auto":
        return torch.float32 if wanted == "float32" else torch.bfloat16
    native = torch.cuda.is_bf16_supported() if device.type == "cuda" else _cpu_computes_bf16()
    return torch.bfloat16 if native else torch.float32


def _cpu_computes_bf16() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags or " bf16" in flags


def _shape(config: Any) -> tuple[int, int, int]:
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return config.num_hidden_layers, getattr(config, "num_key_value_heads", None) or heads, head_dim


def _block_bytes(config: EngineConfig, model_config: Any, dtype: torch.dtype) -> int:
    return block_bytes(*_shape(model_config), config.block, dtype)


def _pool(config: EngineConfig, model_config: Any, dtype: torch.dtype, device: torch.device) -> KVPool:
    blocks = int(config.kv.device) // _block_bytes(config, model_config, dtype)
    if blocks < 2:
        raise ValueError(f"kv.device: {config.kv.device} bytes hold no block of this model")
    return KVPool(blocks, *_shape(model_config), config.block, dtype, device)


def _test_prompt(vocabulary: int, length: int) -> list[int]:
    """Token ids without meaning, spread over the vocabulary; the same ones every time."""
    return [(7919 * index + 101) % vocabulary for index in range(length)]
