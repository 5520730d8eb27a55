"""The command `hitherto verify`."""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from backends.engine.config import EngineConfig
from gateway.config import Settings
from gateway.settings_file import ConfigError

if TYPE_CHECKING:
    from backends.engine.verification import Outcome

_TOPICS = (
    "moonlight bread bicycles glaciers jazz chess volcanoes honey tides maps rain paper clocks salt kites owls bridges "
    "tea magnets poetry soap lighthouses compasses mirrors wool"
).split()
_BACKGROUND = (
    "You answer questions for the visitors of a museum. Be brief and exact, say so when you do not know, and never "
    "mention prices. The museum opens at nine and closes at five, except on Mondays. "
)


def sample_prompts(count: int = 50) -> list[str]:
    """Prompts of 20 to 600 tokens, many of them with a common beginning."""
    return [
        f"{_BACKGROUND * (number % 10)}Tell me about {_TOPICS[number % len(_TOPICS)]}"
        + (", please." if number >= len(_TOPICS) else ".")
        for number in range(count)
    ]


def run(settings: Settings, backend: str | None, file: Path | None) -> bool:
    """Print a table; whether nothing differed. Raises `ConfigError` and what loading raises."""
    engines = {name: config for name, config in settings.backends.items() if isinstance(config, EngineConfig)}
    if backend is None:
        backend = next(iter(engines), "")
    if backend not in engines:
        raise ConfigError(f"there is no engine {backend!r} among the backends ({', '.join(engines) or 'none'})")
    prompts = [line for line in file.read_text().splitlines() if line.strip()] if file else sample_prompts()
    from backends.engine.verification import verify

    config, redis = engines[backend], None
    if config.kv.redis is not None:
        from backends.engine.lower import redis_tier

        redis = redis_tier(config.kv.redis, 3600.0, prefix="hitherto:verify:")
    rows: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in verify(config, settings.data, prompts, redis, lambda line: print(line, file=sys.stderr)):
        rows[outcome.tier].append(outcome)
        if outcome.first_difference is not None and not outcome.lossy:
            print(f"{outcome.tier}: differs at token {outcome.first_difference}: {outcome.prompt[-60:]!r}")
    print(f"{'tier':8} {'prompts':>8} {'with a hit':>11} {'tokens reused':>14} {'mismatches':>11}")
    for tier, outcomes in rows.items():
        hits = sum(outcome.cached_tokens > 0 for outcome in outcomes)
        reused, wrong = sum(o.cached_tokens for o in outcomes), sum(o.first_difference is not None for o in outcomes)
        print(f"{tier:8} {len(outcomes):8} {hits:11} {reused:14} {wrong:11}")
    for tier, outcomes in rows.items():
        if outcomes[0].lossy:
            print(_effect(tier, outcomes))
    return all(outcome.first_difference is None or outcome.lossy for row in rows.values() for outcome in row)


def _effect(tier: str, outcomes: Sequence[Outcome]) -> str:
    """What inexact KV does to the text."""
    same = sum(outcome.first_difference is None for outcome in outcomes)
    agreed = [
        (o.output_tokens if o.first_difference is None else o.first_difference) / max(1, o.output_tokens)
        for o in outcomes
    ]
    change = statistics.mean(outcome.logprob_change for outcome in outcomes)
    return (
        f"{tier} does not promise the same bits: {same} of {len(outcomes)} answers are the same, the others agree "
        f"up to some token ({statistics.mean(agreed):.0%} of all tokens), log-probabilities change by {change:.3f}"
    )
