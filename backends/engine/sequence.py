"""One request inside the engine: its tokens, its blocks, how it is sampled, how far it is. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen; the names and ranges are OpenAI's, plus `top_k` and `min_p` (0 is off)."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    top_logprobs: int | None = None
    """None: no logprobs; 0: only the chosen token's; N: also the N most likely."""
    ignore_eos: bool = False
    prompt_logprobs: int | None = None
    """Like `top_logprobs`, for the tokens of the prompt. The prefix cache is not read then: it holds no logits."""


class Constraint(Protocol):
    """What an output must look like, as a state machine over tokens. Lives on the engine's thread."""

    def mask(self, vocabulary: int) -> Any:
        """The tokens that may come next: bools, one a token id below `vocabulary`. Raises ValueError if that is too
        hard to find out."""
        ...

    def accept(self, token: int) -> None:
        """This one, of those allowed and no end token, came."""
        ...


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities before temperature: of the chosen token, and of the most likely ones."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Emission:
    """What one engine step gives one request: at most one token; `finish` is set on the last emission."""

    token: int | None = None
    logprobs: TokenLogprobs | None = None
    finish: str = ""
    """"" while it goes on, else `stop`, `length`, `cancelled` or `error`."""
    error: str = ""
    sources: Mapping[str, int] = field(default_factory=dict)
    """Tokens of the prompt whose KV was reused, by the tier where it was found."""


@dataclass(eq=False)
class Sequence:
    """A request in the engine. One owner of its blocks: only the scheduler fills and empties `table`."""

    id: str
    prompt: list[int]
    params: SamplingParams
    salt: str = ""
    tenant: str = ""
    """Who it is for: the computer's time is shared fairly between tenants."""
    background: bool = False
    """Computed only while nobody else has anything to compute."""
    private: bool = False
    """Neither reads the prefix cache nor writes to it."""
    emit: Callable[[Emission], None] = lambda emission: None
    eos: frozenset[int] = frozenset()
    constraint: Constraint | None = None

    state: State = State.WAITING
    tokens: list[int] = field(default_factory=list)
    """Prompt and output; all but the last few have their KV computed."""
    computed: int = 0
    """Tokens whose KV is in the pool, counted from position 0."""
    table: list[int] = field(default_factory=list)
    chain: list[bytes] = field(default_factory=list)
    published: int = 0
    sources: dict[str, int] | None = None
    """Tokens found in the prefix cache when it was first scheduled, by tier."""
    loaded: dict[str, int] = field(default_factory=dict)
    """Tokens brought up for it from lower tiers."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the prompt's tokens but the first, as far as computed; only where asked for."""
    sampler_state: Any = None
    overtaken: int = 0
    """Later arrivals that were started before it."""
    looked_below: bool = False
    """Lower tiers were asked for its missing blocks; they are asked once."""
    loading: bool = False
    """Waits for lower tiers."""

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were not computed."""
        return sum((self.sources or {}).values())

    @property
    def reads_cache(self) -> bool:
        """Whether its prompt may be found in the cache, which holds no logits."""
        return not self.private and (self.params.prompt_logprobs is None or self.output_len > 0)

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def output_len(self) -> int:
        return len(self.tokens) - len(self.prompt)

    def finish_reason(self) -> str:
        """Why it ends with the tokens it has now, or "" if it goes on. Stop strings are the text layer's business."""
        heeds_eos = self.constraint is not None or not self.params.ignore_eos
        if self.tokens[-1] in self.eos and heeds_eos and self.output_len:
            return "stop"
        return "length" if self.output_len >= self.params.max_tokens else ""
