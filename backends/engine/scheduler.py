"""Which tokens are computed in the next step. No torch, no clock.

Every running sequence that has only its last token left to compute gets that one (decode); the rest of the step's
token budget goes to prompts, in chunks (as in Sarathi-Serve's chunked prefill). Who starts next: of the tenant that was
served least (a virtual token counter, Sheng et al. 2024), the prompt with the longest known prefix (as SGLang's "lpm"),
unless somebody has been overtaken too often. A prompt whose next unknown block is just being computed by another one
waits for it instead of computing it twice. When blocks run out, the youngest sequence goes back to the queue and
recomputes later (as vLLM's recompute preemption). Background work gets what nobody else wants.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from backends.engine.prefix_cache import PrefixCache, extend_chain, salted
from backends.engine.sequence import Sequence, State


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start … end-1` of a sequence. `samples` if the next token follows from its last row."""

    sequence: Sequence
    start: int
    end: int

    @property
    def samples(self) -> bool:
        return self.end == len(self.sequence.tokens)

    @property
    def wanted(self) -> int:
        """Of how many last rows the logits are needed."""
        sequence = self.sequence
        if sequence.params.prompt_logprobs is not None and self.start < len(sequence.prompt):
            return self.end - self.start
        return int(self.samples)


CANDIDATES = 32
"""Waiting sequences of each tenant, from the oldest on, among which the next one is chosen."""
TENANTS = 10_000
"""Of more than so many, those that are away are forgotten."""
PATIENCE = 16
"""Who was overtaken so many times within a tenant is the tenant's next."""


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_running` sequences at once, `step_tokens` per forward pass."""

    max_running: int = 32
    step_tokens: int = 512


@dataclass
class Counters:
    """Totals since the start, for the metrics."""

    prompt_tokens: int = 0
    cached_tokens: Counter[str] = field(default_factory=Counter)
    """By the tier that they were found in."""
    preemptions: int = 0
    follower_waits: int = 0


class Scheduler:
    """Owns the queue, the running set and every sequence's block table."""

    def __init__(
        self, cache: PrefixCache, limits: Limits, look_below: Callable[[Sequence, int], bool] = lambda *_: False
    ) -> None:
        """`look_below(sequence, matched)` may begin a search for the blocks after the matched ones in lower tiers; True
        if it did: then the sequence waits until its `loading` is taken back."""
        self.cache = cache
        self.pool = cache.pool
        self.limits = limits
        self._look_below = look_below
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.counters = Counters()
        self._served: dict[str, float] = {}
        """Tokens computed for each tenant with work here, from a common start."""

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def capacity(self) -> int:
        """The longest sequence that can ever run, in tokens."""
        return self.pool.total * self.cache.block_size

    def add(self, sequence: Sequence) -> None:
        busy = {item.tenant for item in (*self.running, *self.waiting) if not item.background}
        if sequence.tenant not in busy and not sequence.background:
            # Whoever was away has saved up nothing, but what a tenant had more than others is not forgotten either.
            least = min((self._served.get(tenant, 0.0) for tenant in busy), default=0.0)
            self._served[sequence.tenant] = max(self._served.get(sequence.tenant, 0.0), least)
            if len(self._served) > TENANTS:
                self._served = {tenant: self._served.get(tenant, least) for tenant in (*busy, sequence.tenant)}
        self.waiting.append(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and give its blocks back. Harmless when done twice."""
        if sequence.state is State.RUNNING:
            self.running.remove(sequence)
        elif sequence.state is State.WAITING and sequence in self.waiting:
            self.waiting.remove(sequence)
        self._release(sequence)
        sequence.state = State.FINISHED

    def schedule(self) -> list[Chunk]:
        """The chunks of the next forward pass; empty when there is nothing that can run."""
        budget = self.limits.step_tokens
        chunks: list[Chunk] = []
        preemptions = self.counters.preemptions
        foreground = any(not item.background and not item.loading for item in (*self.running, *self.waiting))
        running = [item for item in self.running if not (foreground and item.background)]
        for sequence in running:  # decodes first: they are short and somebody is reading along
            if sequence.state is State.RUNNING and len(sequence.tokens) - sequence.computed == 1:
                budget -= self._plan(sequence, 1, chunks)
        for sequence in running:
            if budget > 0 and sequence.state is State.RUNNING and len(sequence.tokens) - sequence.computed > 1:
                budget -= self._plan(sequence, budget, chunks)
        if self.counters.preemptions == preemptions:  # else the victims would come straight back
            self._admit(budget, chunks, foreground)
        return [chunk for chunk in chunks if chunk.sequence.state is State.RUNNING]

    def computed(self, chunks: list[Chunk]) -> None:
        """The forward pass of these chunks is done: their KV is valid, and full blocks become findable."""
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.computed = chunk.end
            if not sequence.background:
                self._served[sequence.tenant] = self._served.get(sequence.tenant, 0.0) + chunk.end - chunk.start
            if sequence.private:
                continue
            self._extend(sequence)
            sequence.published = self.cache.publish(
                sequence.tokens, sequence.chain, sequence.table, sequence.computed, sequence.published
            )

    def _admit(self, budget: int, chunks: list[Chunk], foreground: bool) -> None:
        candidates = [item for item in self.waiting if not item.loading and not (foreground and item.background)]
        if not candidates or budget <= 0:
            return
        pending = self._pending_keys(foreground)
        known = {}
        considered: Counter[str] = Counter()
        for sequence in candidates:
            considered[sequence.tenant] += 1
            if considered[sequence.tenant] > CANDIDATES:
                continue
            self._extend(sequence)
            known[sequence] = self.cache.match(sequence.tokens, sequence.chain) if sequence.reads_cache else []
        while known and budget > 0:
            sequence = min(known, key=lambda item: self._rank(item, len(known[item])))
            matched = self.cache.match(sequence.tokens, sequence.chain) if known.pop(sequence) else []
            following = sequence.chain[len(matched) : (len(sequence.tokens) - 1) // self.cache.block_size]
            if sequence.reads_cache and following:
                if following[0] in pending:
                    self.counters.follower_waits += 1
                    continue  # its leader publishes the block within a step or two
                if not sequence.looked_below:
                    sequence.looked_below = True
                    sequence.loading = self._look_below(sequence, len(matched))
                    if sequence.loading:
                        continue
            while not self._fits(sequence, matched):
                backgrounds = [item for item in self.running if item.background]
                if sequence.background or not backgrounds:
                    return  # nobody overtakes the next one for being short
                self._preempt(backgrounds[-1])
            for other in self.waiting:
                if other is sequence:
                    break
                other.overtaken += not other.loading and other.tenant == sequence.tenant
            self.waiting.remove(sequence)
            self._start(sequence, matched)
            budget -= self._plan(sequence, budget, chunks)
            if not sequence.private:
                pending.update(following)

    def _fits(self, sequence: Sequence, matched: list[int]) -> bool:
        """Whether there is a place and memory for one more; alone it always fits."""
        if len(self.running) >= self.limits.max_running:
            return False
        needed = -(-len(sequence.tokens) // self.cache.block_size) - len(matched)
        reserve = len(self.running)  # every running sequence may need one more block at any time
        matched_cached = sum(1 for block in matched if not self.pool.in_use(block))
        return not self.running or needed + reserve <= self.pool.available - matched_cached

    def _rank(self, sequence: Sequence, matched: int) -> tuple[float, bool, int]:
        """Who starts first: the lowest, of equals the oldest."""
        served = self._served.get(sequence.tenant, 0.0)
        patient = sequence.overtaken < PATIENCE
        return (served, patient, -matched if patient else 0)

    def _start(self, sequence: Sequence, matched: list[int]) -> None:
        self.pool.retain(matched)
        sequence.table = matched
        sequence.published = len(matched)
        sequence.computed = len(matched) * self.cache.block_size
        sequence.state = State.RUNNING
        self.running.append(sequence)
        if sequence.sources is None:
            sequence.sources = _sources(sequence.computed, sequence.loaded)
            self.counters.prompt_tokens += len(sequence.prompt)
            self.counters.cached_tokens.update(sequence.sources)

    def _plan(self, sequence: Sequence, budget: int, chunks: list[Chunk]) -> int:
        """Plan up to `budget` tokens of a running sequence; how many were planned."""
        start = sequence.computed
        end = min(len(sequence.tokens), start + budget)
        missing = -(-end // self.cache.block_size) - len(sequence.table)
        while missing > 0:
            blocks = self.pool.allocate(missing)
            if blocks is not None:
                sequence.table.extend(blocks)
                break
            victim = next((item for item in reversed(self.running) if item.background), self.running[-1])
            self._preempt(victim)
            if victim is sequence:
                return 0
        chunks.append(Chunk(sequence, start, end))
        return end - start

    def _preempt(self, sequence: Sequence) -> None:
        self.counters.preemptions += 1
        self.running.remove(sequence)
        self._release(sequence)
        sequence.state = State.WAITING
        self.waiting.appendleft(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.table)
        sequence.table = []
        sequence.computed = 0
        sequence.published = 0

    def _extend(self, sequence: Sequence) -> None:
        extend_chain(sequence.chain, salted(self.cache.root, sequence.salt), sequence.tokens, self.cache.block_size)

    def _pending_keys(self, foreground: bool) -> set[bytes]:
        """Keys of prompt blocks that running sequences are about to compute; one that stands still computes none."""
        shared = (item for item in self.running if not item.private and not (foreground and item.background))
        return {key for sequence in shared for key in sequence.chain[sequence.published :]}


def _sources(cached: int, loaded: Mapping[str, int]) -> dict[str, int]:
    """Where `cached` tokens came from: as many as were loaded from lower tiers, the rest from the device."""
    sources = {}
    for tier, tokens in loaded.items():
        sources[tier] = min(tokens, cached)
        cached -= sources[tier]
    return {name: tokens for name, tokens in {"device": cached, **sources}.items() if tokens}
