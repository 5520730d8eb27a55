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
    tested: verify.SelfTest
    codec: Int8
    """Of this model's blocks, should they be wanted smaller."""


def load(config: EngineConfig, data: Path, say: Callable[[str], None], epoch: int = 0) -> Loaded:
    """Load, reserve, test. KV of another `epoch` is not found again.

    Raises `ModelNotFound`, `UnsupportedModel` or ValueError with a line for the operator.
    """
    from transformers import AttentionInterface
    from transformers.utils import logging

    if config.threads:
        torch.set_num_threads(config.threads)
    logging.disable_progress_bar()
    folder = models.resolve(config.model, data, say)
    device = _device(config.device)
    dtype = _dtype(config.dtype, device)
    say(f"loading {folder.name} as {str(dtype).removeprefix('torch.')} on {device.type}")
    AttentionInterface.register(attention.NAME, attention.paged_attention)
    model = _model(folder, dtype).to(device).eval()
    verify.gate(model.config)
    text = Text(folder)
    prompt = _test_prompt(model.config.vocab_size, PERIOD + config.block // 2)
    with torch.inference_mode():
        ids = torch.tensor([prompt], device=device)
        output = model(input_ids=ids, use_cache=True, logits_to_keep=1)
    reference, shape = output.logits[0].float(), verify.kv_shape(output.past_key_values)
    size = block_bytes(*shape, config.block, dtype)
    pool = _pool(config, shape, size, dtype, device)
    model.set_attn_implementation(attention.NAME)
    if device.type == "cpu":
        packing.pack(model)
    runner = Runner(model, pool)
    needed = verify.scratch_blocks(len(prompt), pool) + 1
    if pool.blocks < needed:
        least = needed * size
        raise ValueError(f"kv.device: {config.kv.device} bytes are too few for this model; it needs {least} at least")
    tested = verify.self_test(runner, reference, prompt, dtype)
    if tested.gap and config.verify_share:
        raise ValueError("verify_share needs a model that keeps its bits on this machine, and this one does not")
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
        f"self-test difference {tested.difference:.2g}"
        + (f"; not bit for bit: another cut of a prompt changes logits by {tested.gap:.2g}" if tested.gap else "")
    )
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    name = str(dtype).removeprefix("torch.")
    codec = Int8(pool.layers, pool.kv_heads, pool.block_size, pool.head_dim, name)
    return Loaded(runner, text, root_key(identity), frozenset(eos_ids), context, vocabulary, name, tested, codec)


def _model(folder: Path, dtype: torch.dtype) -> Any:
    """The model with its own attention, by torch's kernel where it can."""
    from transformers import AutoModelForCausalLM

    try:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    if not getattr(model, "_supports_attention_backend", False):
        raise verify.UnsupportedModel(f"{type(model).__name__} does not let its attention be replaced")
    return model


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


def _pool(
    config: EngineConfig, shape: tuple[int, int, int], size: int, dtype: torch.dtype, device: torch.device
) -> KVPool:
    blocks = int(config.kv.device) // size
    if blocks < 2:
        raise ValueError(f"kv.device: {config.kv.device} bytes hold no block of this model")
    return KVPool(blocks, *shape, config.block, dtype, device)


def _test_prompt(vocabulary: int, length: int) -> list[int]:
    """Token ids without meaning, spread over the vocabulary; the same ones every time."""
    return [(7919 * index + 101) % vocabulary for index in range(length)]
