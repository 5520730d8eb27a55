"""Sequences through a real engine, waited for."""

from __future__ import annotations

import threading

from backends.engine.engine import Engine
from backends.engine.sequence import Emission, SamplingParams, Sequence


def compute(
    engine: Engine, prompts: list[list[int]], params: SamplingParams, eos: frozenset[int] = frozenset()
) -> tuple[list[list[int]], list[int]]:
    """Output tokens of prompts that are submitted together, and how many tokens of each were cached."""
    outputs: list[list[int]] = [[] for _ in prompts]
    done = [threading.Event() for _ in prompts]
    sequences = []
    for index, prompt in enumerate(prompts):

        def emit(emission: Emission, index: int = index) -> None:
            assert emission.finish != "error", emission.error
            if emission.token is not None:
                outputs[index].append(emission.token)
            if emission.finish:
                done[index].set()

        sequences.append(Sequence(str(index), prompt, params, emit=emit, eos=eos))
        engine.submit(sequences[-1])
    assert all(event.wait(120) for event in done)
    return outputs, [sequence.cached_tokens for sequence in sequences]
