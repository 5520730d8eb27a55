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
from backends.engine.snapshots import SnapshotRunner
from backends.engine.text import Text


@dataclass(frozen=True)
class Loaded:
    """Everything about one model that the engine needs."""

    runner: Runner | SnapshotRunner
    text: Text
    root: bytes
    eos: frozenset[int]
    context: int
    vocabulary: int
    """Rows of the embedding: token ids must be below."""
    dtype: str
    tested: verify.SelfTest


def load(config: EngineConfig, data: Path, say: Callable[[str], None], epoch: int = 0) -> Loaded:
    """Load, reserve, test. KV of another `epoch` is not found again.

    Raises `ModelNotFound`, `UnsupportedModel` or ValueError with a line for the operator.
    """
    from transformers.utils import logging

    if config.threads:
        torch.set_num_threads(config.threads)
    logging.disable_progress_bar()
    folder = models.resolve(config.model, data, say)
    device = _device(config.device)
    dtype = _dtype(config.dtype, device)
    say(f"loading {folder.name} as {str(dtype).removeprefix('torch.')} on {device.type}")
    model = _model(folder, dtype).to(device).eval()
    paged = verify.gate(model.config)
    prompt = _test_prompt(model.config.vocab_size, PERIOD + config.block // 2)
    with torch.inference_mode():
        ids = torch.tensor([prompt], device=device)
        output = model(input_ids=ids, use_cache=paged, logits_to_keep=1)
    runner: Runner | SnapshotRunner
    if paged:
        runner = _paged_runner(config, model, verify.kv_shape(getattr(output, "past_key_values", None)), dtype)
    else:
        say("its layers keep state beside KV: requests are computed one by one, from snapshots; no lower tiers")
        try:
            runner = SnapshotRunner(model, int(config.kv.device))
        except (ValueError, AttributeError, TypeError) as error:
            raise verify.UnsupportedModel(f"its state cannot be kept: {error}") from error
    needed = verify.scratch_blocks(len(prompt), runner.block_size) + 1
    if runner.blocks < needed:
        least = needed * runner.block_bytes
        raise ValueError(f"kv.device: {config.kv.device} bytes are too few for this model; it needs {least} at least")
    tested = verify.self_test(runner, output.logits[0].float(), prompt, dtype)
    if tested.gap and config.verify_share:
        raise ValueError("verify_share needs a model that keeps its bits on this machine, and this one does not")
    runner.forget()
    text = Text(folder)
    loaded = Loaded(
        runner=runner,
        text=text,
        root=root_key(_identity(config, folder, dtype, device, epoch)),
        eos=frozenset(_end_tokens(model, text)),
        context=int(getattr(model.config, "max_position_embeddings", 0) or 4096),
        vocabulary=int(model.get_input_embeddings().weight.shape[0]),
        dtype=str(dtype).removeprefix("torch."),
        tested=tested,
    )
    say(
        f"ready: {runner.blocks - 1} KV blocks of {runner.block_size} tokens, context {loaded.context}, "
        f"self-test difference {tested.difference:.2g}"
        + (f"; not bit for bit: another cut of a prompt changes logits by {tested.gap:.2g}" if tested.gap else "")
    )
    return loaded


def _identity(
    config: EngineConfig, folder: Path, dtype: torch.dtype, device: torch.device, epoch: int
) -> dict[str, str]:
    """What makes KV comparable."""
    return {
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


def _end_tokens(model: Any, text: Text) -> set[int]:
    """What the model ends an answer with, by its generation settings and its tokenizer."""
    eos, also = model.generation_config.eos_token_id, text.tokenizer.eos_token_id
    return ({eos} if isinstance(eos, int) else set(eos or ())) | (set() if also is None else {also})


def _paged_runner(config: EngineConfig, model: Any, shape: tuple[int, int, int], dtype: torch.dtype) -> Runner:
    """The model with our attention, over a pool of its own."""
    from transformers import AttentionInterface

    size = block_bytes(*shape, config.block, dtype)
    blocks = int(config.kv.device) // size
    if blocks < 2:
        raise ValueError(f"kv.device: {config.kv.device} bytes hold no block of this model")
    AttentionInterface.register(attention.NAME, attention.paged_attention)
    model.set_attn_implementation(attention.NAME)
    if model.device.type == "cpu":
        packing.pack(model)
    return Runner(model, KVPool(blocks, *shape, config.block, dtype, model.device))


def _model(folder: Path, dtype: torch.dtype) -> Any:
    """The model with its own attention, by torch's kernel where it can."""
    from transformers import AutoModelForCausalLM

    try:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
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


def _test_prompt(vocabulary: int, length: int) -> list[int]:
    """Token ids without meaning, spread over the vocabulary; the same ones every time."""
    return [(7919 * index + 101) % vocabulary for index in range(length)]
