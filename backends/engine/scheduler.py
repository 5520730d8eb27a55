"""Which tokens are computed in the next step. No torch, no clock.

Every running sequence that has only its last token left to compute gets that one (decode); the rest of the step's
token budget goes to prompts in order of arrival, in chunks (as in Sarathi-Serve's chunked prefill). A prompt whose
next unknown block is just being computed by another one waits for it instead of computing it twice. When blocks run
out, the youngest sequence goes back to the queue and recomputes later (as vLLM's recompute preemption).
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

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def capacity(self) -> int:
        """The longest sequence that can ever run, in tokens."""
        return self.pool.total * self.cache.block_size

    def add(self, sequence: Sequence) -> None:
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
        for sequence in list(self.running):  # decodes first: they are short and somebody is reading along
            if sequence.state is State.RUNNING and len(sequence.tokens) - sequence.computed == 1:
                budget -= self._plan(sequence, 1, chunks)
        for sequence in list(self.running):
            if budget > 0 and sequence.state is State.RUNNING and len(sequence.tokens) - sequence.computed > 1:
                budget -= self._plan(sequence, budget, chunks)
        if budget > 0 and self.counters.preemptions == preemptions:  # else the victims would come straight back
            self._admit(budget, chunks)
        return [chunk for chunk in chunks if chunk.sequence.state is State.RUNNING]

    def computed(self, chunks: list[Chunk]) -> None:
        """The forward pass of these chunks is done: their KV is valid, and full blocks become findable."""
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.computed = chunk.end
            self._extend(sequence)
            sequence.published = self.cache.publish(
                sequence.tokens, sequence.chain, sequence.table, sequence.computed, sequence.published
            )

    def _admit(self, budget: int, chunks: list[Chunk]) -> None:
        pending = self._pending_keys()
        for sequence in list(self.waiting):
            if budget <= 0 or len(self.running) >= self.limits.max_running:
                return
            if sequence.loading:
                continue
            self._extend(sequence)
            # A cache holds no logits, so a prompt whose log-probabilities are wanted is computed whole.
            reads = sequence.params.prompt_logprobs is None or sequence.output_len > 0
            matched = self.cache.match(sequence.tokens, sequence.chain) if reads else []
            following = sequence.chain[len(matched) : (len(sequence.tokens) - 1) // self.cache.block_size]
            if reads and following and following[0] in pending:
                self.counters.follower_waits += 1
                continue  # its leader publishes the block within a step or two
            if reads and following and not sequence.looked_below:
                sequence.looked_below = True
                sequence.loading = self._look_below(sequence, len(matched))
                if sequence.loading:
                    continue
            needed = -(-len(sequence.tokens) // self.cache.block_size) - len(matched)
            reserve = len(self.running)  # every running sequence may need one more block at any time
            matched_cached = sum(1 for block in matched if not self.pool.in_use(block))
            if self.running and needed + reserve > self.pool.available - matched_cached:
                return  # strictly in order of arrival: nobody is overtaken for being long
            self.waiting.remove(sequence)
            self._start(sequence, matched)
            budget -= self._plan(sequence, budget, chunks)
            pending.update(following)

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
            victim = self.running[-1]
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

    def _pending_keys(self) -> set[bytes]:
        """Keys of prompt blocks that running sequences are about to compute."""
        return {key for sequence in self.running for key in sequence.chain[sequence.published :]}


def _sources(cached: int, loaded: Mapping[str, int]) -> dict[str, int]:
    """Where `cached` tokens came from: as many as were loaded from lower tiers, the rest from the device."""
    sources = {}
    for tier, tokens in loaded.items():
        sources[tier] = min(tokens, cached)
        cached -= sources[tier]
    return {name: tokens for name, tokens in {"device": cached, **sources}.items() if tokens}
