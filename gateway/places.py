"""What is known of each place that answers requests: a backend, or one replica of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from backends.protocol import Server
from gateway.metrics import Metrics
from policies.breaker import Breaker, BreakerConfig, Pass
from policies.retry import RetryBudget

log = logging.getLogger("hitherto.places")

MAX_PACE = 60.0
_STATES = {"closed": 0, "half-open": 1, "open": 2}


@dataclass(slots=True)
class Place:
    """One place. `breaker` None: it is always asked."""

    server: Server
    breaker: Breaker | None
    told: Callable[[Place, str], None]
    retries: RetryBudget = field(default_factory=RetryBudget)
    pace: float | None = None
    """Seconds to the first byte, smoothed; None before the first."""
    failure: str = ""
    """The last one."""

    @property
    def name(self) -> str:
        return self.server.name

    def ask(self) -> Pass | None:
        """Permission for a request; tell what became of it with `succeeded`, `failed` or `dropped`."""
        if self.breaker is None:
            return Pass(0)
        before = self.breaker.state
        permission = self.breaker.ask(time.monotonic())
        self._tell(before)
        return permission

    def succeeded(self, permission: Pass, seconds: float | None, stream: bool) -> None:
        """It answered, the first byte after so long; None: that it will not, for what is no fault of its own."""
        if seconds is not None:
            self.pace = seconds if self.pace is None else 0.8 * self.pace + 0.2 * seconds
        if self.breaker is None:
            return
        before, slow = self.breaker.state, self.breaker.config.slow
        if stream and slow is not None and seconds is not None and seconds > slow:
            self.failure = f"the first byte took {seconds:.1f} s"
            self.breaker.failed(time.monotonic(), permission)
        else:
            self.breaker.succeeded(time.monotonic(), permission)
        self._tell(before)

    def failed(self, permission: Pass, why: str) -> None:
        """It is to blame for a failure."""
        self.failure = why
        self.pace = min(MAX_PACE, max(1.0, 2 * (self.pace or 0.5)))  # failing fast is not being fast
        if self.breaker is not None:
            before = self.breaker.state
            self.breaker.failed(time.monotonic(), permission)
            self._tell(before)

    def dropped(self, permission: Pass) -> None:
        """Nothing was learnt."""
        if self.breaker is not None:
            self.breaker.dropped(permission)

    def wait(self) -> float:
        """Seconds until it may be worth asking."""
        return self.breaker.wait(time.monotonic()) if self.breaker is not None else 0.0

    @property
    def expected(self) -> float:
        """Seconds to the first byte, by what was seen and by what waits there now."""
        return (self.pace or 0.0) * (self.server.in_flight + 1)

    def _tell(self, before: str) -> None:
        if self.breaker is not None and self.breaker.state != before:
            self.told(self, before)


class Places:
    """All places by name; each comes to be when it is first asked for."""

    def __init__(self, breakers: Mapping[str, BreakerConfig | None], metrics: Metrics) -> None:
        """`breakers`: by backend; a replica has its backend's settings."""
        self._breakers, self._metrics = breakers, metrics
        self._known: dict[str, Place] = {}

    def at(self, backend: str, server: Server) -> Place:
        """What is known of one of a backend's servers."""
        name = server.name
        place = self._known.get(name)
        if place is None:
            config = self._breakers.get(backend)
            place = Place(server, Breaker(config) if config is not None else None, self._told)
            self._known[name] = place
            self._metrics.breaker_state.labels(name).set(0)
        return place

    def states(self) -> list[dict[str, object]]:
        """What an operator wants to see."""
        return [
            {
                "place": place.name,
                "state": place.breaker.state if place.breaker is not None else "none",
                "opens_again_in": round(place.wait(), 1),
                "in_flight": place.server.in_flight,
                "first_byte_seconds": None if place.pace is None else round(place.pace, 4),
                "last_failure": place.failure,
            }
            for place in self._known.values()
        ]

    def _told(self, place: Place, before: str) -> None:
        assert place.breaker is not None
        state = place.breaker.state
        self._metrics.breaker_state.labels(place.name).set(_STATES[state])
        why = f": {place.failure}; it is asked again in {place.wait():.1f} s" if state == "open" else ""
        log.log(logging.WARNING if state == "open" else logging.INFO, "the breaker of %s is %s (was %s)%s",
                place.name, state, before, why)  # fmt: skip
