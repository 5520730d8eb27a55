"""The lower tiers together: blocks are written behind, and those that the device lacks are looked for, on one thread.

A tier may never cost more than it saves: a load happens only if, at the speed last measured, it beats computing the
same tokens; it has a deadline, after which the engine computes and ignores what still comes; writes wait in a bounded
queue and are dropped when it is full; and a tier that fails is left alone for a while (a breaker per tier).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from backends.engine.tiers.codec import Unsound, seal, unseal
from backends.engine.tiers.contract import Tier
from backends.engine.tiers.int8 import Codec, Raw

log = logging.getLogger("hitherto.engine")

T = TypeVar("T")

FAULTS_TO_OPEN = 3
OPEN_SECONDS = 5.0
QUEUE_BLOCKS = 256
PROBE_EVERY = 16
_SMOOTHING = 0.3


@dataclass(frozen=True, slots=True)
class Wanted:
    """A block that the device lacks."""

    key: bytes
    tokens: tuple[int, ...]
    first: bool = False
    """The beginning of a prompt."""


@dataclass
class TierState:
    """One tier, with what was seen of it."""

    tier: Tier
    bytes_per_second: float | None = None
    """Of loads, checks included; None until the first."""
    faults_in_row: int = 0
    open_until: float = 0.0
    hits: int = 0
    loads: int = 0
    faults: int = 0
    unsound: int = 0
    skipped: int = 0
    """Loads that would have been slower than computing."""
    loaded_bytes: int = 0
    load_seconds: float = 0.0
    bytes_used: int = 0
    """As of the last write or load: asking may cost a round trip, and belongs on the ladder's thread."""

    def failed(self, now: float, error: Exception) -> None:
        self.faults += 1
        self.faults_in_row += 1
        if self.faults_in_row >= FAULTS_TO_OPEN:
            if self.open_until <= now:
                log.warning("KV tier %s is left alone for %g s: %s", self.tier.name, OPEN_SECONDS, error)
            self.open_until = now + OPEN_SECONDS


@dataclass
class Load:
    """A search under way. `payloads` are the blocks found, in order, once `on_done` was called."""

    wanted: Sequence[Wanted]
    on_done: Callable[[Load], None]
    payloads: list[memoryview] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    """In which tier each of them was."""
    abandoned: bool = False


class Ladder:
    """Lower tiers, fastest first. `store` and `find` are for the engine's thread and return at once."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        root: bytes,
        codec: Codec | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._codec = codec or Raw()
        self.states = [TierState(tier) for tier in tiers]
        self.dropped = 0
        self.prefill_rate: float | None = None
        """Tokens per second that the engine computes; it says so as it learns it."""
        self.always_load = False
        """Load even where computing would be faster."""
        self._root, self._clock = root, clock
        self._urgent: deque[Callable[[], None]] = deque()
        self._stores: deque[tuple[Wanted, Callable[[], bytes]]] = deque()
        self._promoted: list[tuple[TierState, bytes, bytes]] = []
        """Blocks found in a lower tier, and the tiers above that should have them."""
        self._closing = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="kv-tiers", daemon=True)
        self._thread.start()
        self._at_once(self._measure_all)  # a tier may hold blocks of an earlier run

    def store(self, block: Wanted, read: Callable[[], Callable[[], bytes]]) -> None:
        """Write a block behind; dropped, and counted, when too many wait.

        `read` copies it at once, and is not called if it is dropped; what it returns is called on the ladder's thread.
        """
        with self._wake:
            if len(self._stores) >= QUEUE_BLOCKS:
                self.dropped += 1
                return
            self._stores.append((block, read()))
            self._wake.notify()

    def find(self, wanted: Sequence[Wanted], on_done: Callable[[Load], None]) -> Load:
        """Look for these blocks, from the first up to a gap; `on_done` is called on the ladder's thread."""
        load = Load(wanted, on_done)
        self._at_once(lambda: self._load(load))
        return load

    def clear(self, on_done: Callable[[], None] = lambda: None) -> None:
        """Forget every block in every tier, after what is being done now; a tier that is left alone is tried all the
        same."""

        def work() -> None:
            for state in self.states:
                state.open_until = 0.0
                self._guarded(state, state.tier.clear)
            self._measure_all()
            on_done()

        with self._wake:
            self._stores.clear()
        self._at_once(work)

    def delete(self, keys: Sequence[bytes]) -> None:
        """Forget blocks in every tier: what is in them is wrong."""

        def work() -> None:
            for state in self.states:
                state.open_until = 0.0
                for key in keys:
                    self._guarded(state, lambda tier=state.tier, key=key: tier.delete(key))  # type: ignore[misc]

        with self._wake:
            wrong = set(keys)
            self._stores = deque(item for item in self._stores if item[0].key not in wrong)
        self._at_once(work)

    def close(self) -> None:
        """Write what waits, then end."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()
        for state in self.states:
            self._guarded(state, state.tier.close)

    def _at_once(self, job: Callable[[], None]) -> None:
        with self._wake:
            self._urgent.append(job)
            self._wake.notify()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._urgent or self._stores or self._closing):
                    self._wake.wait()
                job = self._urgent.popleft() if self._urgent else None  # loads go first: somebody waits for them
                block = self._stores.popleft() if job is None and self._stores else None
            if job is not None:
                job()
            elif block is not None:
                self._write(*block)
            else:
                return

    def _write(self, block: Wanted, payload: Callable[[], bytes]) -> None:
        sealed = seal(self._root, block.key, block.tokens, self._codec.encode(payload(), block.first))
        for state in self.states:
            self._guarded(state, lambda tier=state.tier: tier.has([block.key]) or tier.put(block.key, sealed))  # type: ignore[misc]
            if not self._stores:
                self._measure(state)

    def _measure_all(self) -> None:
        for state in self.states:
            self._measure(state)

    def _measure(self, state: TierState) -> None:
        size = self._guarded(state, lambda: state.tier.bytes_used)
        state.bytes_used = state.bytes_used if size is None else size

    def _load(self, load: Load) -> None:
        try:
            for position, state in enumerate(self.states):
                missing = load.wanted[len(load.payloads) :]
                if missing and not load.abandoned:
                    self._load_from(position, state, missing, load)
        finally:
            load.on_done(load)
        for state, key, sealed in self._promoted:  # nobody waits for these any more
            self._guarded(state, lambda tier=state.tier, key=key, sealed=sealed: tier.put(key, sealed))  # type: ignore[misc]
        self._promoted.clear()

    def _load_from(self, position: int, state: TierState, missing: Sequence[Wanted], load: Load) -> None:
        keys = [block.key for block in missing]
        count = self._guarded(state, lambda: state.tier.has(keys)) or 0
        if not count or self._is_slower(state, missing[:count]):
            return
        started = self._clock()
        found = self._guarded(state, lambda: state.tier.get(keys[:count])) or []
        size = 0
        for block, sealed in zip(missing, found, strict=False):
            payload = self._checked(state, block, sealed)
            if sealed is None or payload is None:
                break
            load.payloads.append(payload)
            load.sources.append(state.tier.name)
            size += len(sealed)
            self._promoted += [(upper, block.key, sealed) for upper in self.states[:position]]
            state.hits += 1
        seconds = self._clock() - started
        state.loads += 1
        state.loaded_bytes += size
        state.load_seconds += seconds
        if size and seconds > 0:
            rate, old = size / seconds, state.bytes_per_second
            state.bytes_per_second = rate if old is None else old + _SMOOTHING * (rate - old)

    def _is_slower(self, state: TierState, blocks: Sequence[Wanted]) -> bool:
        """Whether computing these tokens would be done sooner than loading them."""
        if self.always_load or state.bytes_per_second is None or self.prefill_rate is None or not state.hits:
            return False  # nothing measured yet: this load is the measurement
        size = state.loaded_bytes / state.hits * len(blocks)
        tokens = sum(len(block.tokens) for block in blocks)
        slower = size / state.bytes_per_second > tokens / self.prefill_rate
        state.skipped += slower
        if slower and state.skipped % PROBE_EVERY == 0:
            return False  # speeds change, and only a load measures them
        return slower

    def _checked(self, state: TierState, block: Wanted, sealed: bytes | None) -> memoryview | None:
        if sealed is None:
            return None
        try:
            return self._codec.decode(unseal(sealed, self._root, block.key, block.tokens))
        except Unsound as error:
            state.unsound += 1
            log.warning("KV tier %s held a block that is not usable (%s); it is removed", state.tier.name, error)
            self._guarded(state, lambda: state.tier.delete(block.key))
            return None

    def _guarded(self, state: TierState, action: Callable[[], T]) -> T | None:
        """The result, or None if the tier fails or is left alone after failing."""
        now = self._clock()
        if now < state.open_until:
            return None
        try:
            result = action()
        except Exception as error:
            state.failed(now, error)
            return None
        state.faults_in_row = 0
        return result
