"""Proof in production: some answers behind a reused prefix are computed once more without it, and must be the same.

Runs on the engine's thread, as background work that neither reads the prefix cache nor writes to it. No torch.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from backends.engine.prefix_cache import PrefixCache
from backends.engine.sequence import Emission
from backends.engine.sequence import Sequence as Request

log = logging.getLogger("hitherto.engine")

TOKENS = 64
"""Of an answer, how many are compared."""
AT_ONCE = 4


class Shadow:
    """Chooses `share` of the finished sequences. A difference quarantines the blocks: `delete` takes their keys."""

    def __init__(
        self,
        share: float,
        cache: PrefixCache,
        delete: Callable[[Sequence[bytes]], None],
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.checked = self.mismatches = 0
        self._share, self._cache, self._delete, self._chance = share, cache, delete, chance
        self._under_way = 0

    def twin(self, sequence: Request) -> Request | None:
        """A sequence that computes the same without the cache, where this one is to be checked."""
        if not sequence.cached_tokens or sequence.background or sequence.constraint is not None:
            return None
        if self._under_way >= AT_ONCE or self._chance() >= self._share:
            return None
        params = replace(sequence.params, max_tokens=min(sequence.output_len, TOKENS), top_logprobs=None)
        twin = Request(f"{sequence.id} again", sequence.prompt, params, eos=sequence.eos, background=True, private=True)

        def emit(emission: Emission) -> None:
            if emission.finish:
                self._under_way -= 1
                if emission.token is not None:
                    self._compare(sequence, twin)

        twin.emit = emit
        self._under_way += 1
        return twin

    def _compare(self, sequence: Request, twin: Request) -> None:
        self.checked += 1
        if twin.output == sequence.output[: twin.output_len]:
            return
        self.mismatches += 1
        keys = sequence.chain[: sequence.cached_tokens // self._cache.block_size]
        log.error("reused KV changed an answer (request %s): %d blocks are quarantined", sequence.id, len(keys))
        self._cache.quarantine(keys)
        self._delete(keys)
