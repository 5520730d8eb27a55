"""From a request to an upstream's response: candidates in order, again and elsewhere only before the first byte."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from urllib.parse import unquote

import orjson

from backends import prompt_cache, vllm
from backends.dialects import forms, openai_chat
from backends.dialects.openai_chat import MalformedRequest
from backends.prompt_cache import Reuse
from backends.protocol import (
    Backend,
    BackendError,
    BackendInterrupted,
    BackendTimeout,
    Call,
    NobodyLeft,
    Reply,
    Server,
    Usage,
)
from backends.upstream import HOP_BY_HOP
from gateway.api.auth import is_credential
from gateway.ask import Ask, Try
from gateway.errors import ModelNotAllowed, Unable, UnknownModel
from gateway.hedges import Hedges, first_answer
from gateway.metrics import Metrics
from gateway.places import Place, Places
from gateway.tenant import Tenant
from gateway.tries import Outcome, attempt
from policies import retry, routing
from policies.breaker import Pass
from policies.redaction import masked
from policies.routing import Route, Target

log = logging.getLogger("hitherto.dispatch")

_NOT_FORWARDED = HOP_BY_HOP | {"host", "content-length", "accept-encoding", "expect"}
_MESSAGES = ("/messages", "/messages/count_tokens")
_MASKABLE = 16_384
"""Longer texts are not searched for what must not be stored, but not stored at all."""
_NOT_OURS = frozenset(
    b"x-hitherto-" + name
    for name in (
        b"cost-usd",
        b"saved-usd",
        b"cache",
        b"reason",
        b"entry",
        b"similarity",
        b"score",
        b"backend",
        b"model",
        b"prompt-cache",
    )
)
_OF_THE_BODY = frozenset({b"content-length", b"etag", b"digest", b"content-md5", b"content-digest"})
_TOLD_ON_REQUEST = ("/chat/completions", "/completions")
"""Paths whose streams tell their usage only if they are asked for it."""
_STYLES = {"breakpoints": ("/messages",), "key": ("/chat/completions", "/responses")}
"""On which paths a provider's prompt cache is asked for in which style."""


@dataclass(frozen=True, slots=True)
class Told:
    """What is known of a computation at its end: tokens, where they are told; bytes of the body, and pieces of text."""

    usage: Usage | None
    size: int = 0
    deltas: int = 0
    whole: bool = True
    """Whether the usage is that of the end."""


def _unsettled(told: Told) -> list[tuple[bytes, bytes]]:
    return []


@dataclass(slots=True)
class Dispatched:
    """A response that is under way, and who gives it. `fallback`: not one of those whose answer this is to be."""

    reply: Reply
    backend: str
    kind: str
    model: str
    fallback: bool
    identity: str = ""
    prompt_cache: str = ""
    """What was done for the provider's prompt cache, or would be."""
    settle: Callable[[Told], list[tuple[bytes, bytes]]] = _unsettled
    """Tell at the end, once, what it took: what it cost, as headers."""
    load: int = 1
    """How many requests its place had when it was sent there, with it."""
    hides_usage: bool = False
    """Whether a stream tells usage that its client did not ask for."""

    failed: bool = False
    """Whether it is the least bad of several failures: its status may say 200 all the same."""

    @property
    def priced(self) -> tuple[str, str, str]:
        """What the price depends on: the model, the kind of backend, its URL."""
        return self.model, self.kind, self.identity

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The response's, without those that would be wrong of a body of which usage is kept back, and without what
        another gateway of our kind says of its own doing."""
        hidden = _NOT_OURS | _OF_THE_BODY if self.hides_usage else _NOT_OURS
        return [pair for pair in self.reply.headers if pair[0] not in hidden]


@dataclass(slots=True)
class Candidate:
    """One place that may be asked, with its permission; `tried` when it was."""

    target: Target
    backend: Backend
    server: Server
    place: Place
    permission: Pass
    note: str = ""
    tried: Try | None = None
    load: int = 1


class _Work:
    """One request on its way through its candidates."""

    def __init__(
        self, ask: Ask, route: Route, targets: Sequence[Target], equals: Sequence[Target], deadline: float | None
    ) -> None:
        """`deadline`: of the event loop's clock."""
        self.ask, self.route, self.targets, self.equals, self.deadline = ask, route, targets, equals, deadline
        self.began = time.monotonic()
        self.bodies: dict[tuple[str, str | None], tuple[bytes, str]] = {}
        """The request as each target gets it, and what was done for the prompt cache."""
        self.not_before: dict[str, float] = {}
        """When a place wants to be asked again."""
        self.out: set[str] = set()
        """Places that will say the same however often they are asked."""
        self.worst: tuple[Outcome, Candidate] | None = None
        """The failure that tells most, for when nobody answers."""

    @property
    def late(self) -> bool:
        return self.deadline is not None and asyncio.get_running_loop().time() >= self.deadline

    async def failed(self, outcome: Outcome, candidate: Candidate) -> None:
        """Remember what a failure means for further tries."""
        name = candidate.place.name
        if outcome.wait is not None:
            self.not_before[name] = time.monotonic() + outcome.wait
        if outcome.kind in ("too-long", "refused"):
            self.out.add(name)
        before, other = self.worst, outcome
        if before is None or retry.RANK[outcome.kind] >= retry.RANK[before[0].kind]:
            self.worst = outcome, candidate
            if before is None:
                return
            other = before[0]
        await other.drop()

    async def drop(self) -> None:
        if self.worst is not None:
            await self.worst[0].drop()


class Dispatch:
    """Knows the backends and which model runs where."""

    def __init__(
        self,
        backends: Mapping[str, Backend],
        routes: Mapping[str, Route],
        salt_key: bytes,
        metrics: Metrics,
        places: Places,
    ) -> None:
        self.backends = backends
        self.routes = routes
        self.places = places
        self._salt_key, self._metrics = salt_key, metrics
        self._draw = random.Random()
        self._hedges = Hedges(metrics)
        self._reuse = Reuse()
        self.salt: Callable[[str], str] = lru_cache(maxsize=4096)(self._salt)
        """A tenant's secret by its name: prefix KV is as private as answers are."""

    def route(self, model: str, tenant: Tenant) -> Route:
        """Where a model may run for a tenant. Raises `ModelNotAllowed` or `UnknownModel`."""
        policy = tenant.policy
        if policy.models != ("*",) and not routing.allows(policy.models, model):
            raise ModelNotAllowed(f"the model {model!r} is not one of yours; GET /v1/models lists those", model)
        for table in (policy.routes, self.routes):
            if table and (entry := routing.match(model, table)) is not None:
                return table[entry]
        raise UnknownModel(f"the model {model!r} does not exist here; GET /v1/models lists those that do", model)

    def identity(self, ask: Ask) -> tuple[str, str, str]:
        """What decides the answer beside the request: backends, their identities, the model there.

        Equals that share the load are one: any of them gives the answer. Raises as `route`, or `Unable`.
        """
        route = self.route(ask.model, ask.tenant)
        able = self._able(route, ask)
        equals = route.equals if able is route.targets else routing.equals(able)
        if len(equals) == 1:
            target = equals[0]
            return target.backend, self.backends[target.backend].identity, target.model or ask.model
        each = sorted((one.backend, self.backends[one.backend].identity, one.model or ask.model) for one in equals)
        backends, identities, models = (list(part) for part in zip(*each, strict=True))
        return "+".join(backends), orjson.dumps(identities).decode(), orjson.dumps(models).decode()

    def priced(self, ask: Ask, name: str = "") -> tuple[str, str, str]:
        """What the price of a request probably depends on: as `Dispatched.priced`, of a backend or of the first
        candidate."""
        target = Target(name) if name else self.route(ask.model, ask.tenant).targets[0]
        backend = self.backends[target.backend]
        return target.model or ask.model, backend.kind, backend.identity

    def priced_by_name(self, model: str) -> tuple[str, str, str]:
        """As `priced`, for a name that somebody asks the price of: of its first candidate, or of the name itself."""
        entry = routing.match(model, self.routes)
        if entry is None:
            return model, "openai", ""
        target = self.routes[entry].targets[0]
        backend = self.backends[target.backend]
        return target.model or model, backend.kind, backend.identity

    async def open(self, ask: Ask) -> Dispatched:
        """The first candidate that answers, or the failure that tells most. Raises a `BackendError` or `Unable`."""
        work = self._work(ask)
        try:
            for number in range(work.route.retry.attempts):
                if number and not await self._paused(work, number):
                    break
                for candidate in (waiting := self._permitted(work, number)):
                    outcome, candidate = await self._answer(candidate, waiting, work)
                    if outcome.kind in ("", "final"):
                        await work.drop()
                        return self._dispatched(outcome, candidate, work)
                    await self._failed(outcome, candidate, work)
                    if work.late:
                        break
                if work.worst is None:
                    raise self._nobody(work.targets)
            assert work.worst is not None
            outcome, candidate = work.worst
            if outcome.error is not None:
                raise outcome.error
            if outcome.kind == "refused":  # our key is not the client's matter, and what is said of it even less
                status = outcome.reply.status if outcome.reply is not None else 0
                raise BackendError(candidate.place.name, f"it refuses the gateway's own key ({status})")
            return self._dispatched(outcome, candidate, work)
        except BaseException:
            await work.drop()
            raise

    async def relay(self, backend: str, method: str, ask: Ask) -> Dispatched:
        """Pass any other request on as it is. Raises a `BackendError`."""
        _refuse_dot_segments(ask.path)
        target = self.backends[backend]
        body = vllm.salted(ask.body, self.salt(ask.tenant.name)) if target.kind == "vllm" and ask.fields else ask.body
        call = Call(method, ask.path, ask.query, self._headers(ask.headers, target, ask.tenant), body)
        place, tried = target.places(ask.prefix())[0], Try(backend, (ask.model, target.kind, target.identity))
        if ask.model:  # else it computes nothing that has a price
            ask.tries.append(tried)
        try:
            reply = await place.open(call)
        except BackendError as error:
            tried.ended, tried.outcome = time.monotonic(), _outcome(Outcome("broken", error=error))
            raise
        tried.outcome = ""
        return Dispatched(reply, backend, target.kind, ask.model, False, target.identity, load=max(1, place.in_flight))

    def redaction(self, tenant: Tenant) -> Callable[[str], str | None] | None:
        """What of a text may be stored or logged for a tenant; None: all of it."""
        rules = tenant.policy.redaction
        if not rules.text:
            return lambda text: None
        key = self._salt_key + tenant.name.encode()
        if not rules.mask:
            return None
        return lambda text: masked(text, rules.mask, key) if len(text) <= _MASKABLE else None

    def _salt(self, tenant: str) -> str:
        """Keyed, so that a tenant's name cannot be guessed into its salt."""
        return hmac.new(self._salt_key, tenant.encode(), hashlib.sha256).hexdigest()

    def _able(self, route: Route, ask: Ask) -> Sequence[Target]:
        """Who can answer, in the order of the configuration. Raises `Unable`."""
        targets: Sequence[Target] = route.targets
        if ask.path in _MESSAGES:  # those who speak that language, if anybody does
            targets = [one for one in targets if self.backends[one.backend].kind in ("anthropic", "vllm")] or targets
        if not route.is_choosy:
            return targets
        found, why = routing.able(targets, routing.needs(ask.fields), ask.prompt_tokens + ask.answer_tokens)
        if not found:
            raise Unable(f"no backend of the model {ask.model!r} can answer this: {why}")
        return found

    def _work(self, ask: Ask) -> _Work:
        """Who can answer, in the order in which they are asked. Raises as `route`, or `Unable`."""
        route = self.route(ask.model, ask.tenant)
        targets = self._able(route, ask)
        equals = route.equals if targets is route.targets else routing.equals(targets)
        if len(targets) > 1 and any(target.weight is not None for target in targets):
            pace = {one.backend: self._expected(one.backend) for one in targets} if route.choose == "fastest" else {}
            targets = routing.in_order(targets, route.choose, ask.conversation(), self._draw, pace)
        deadline = None if route.total is None else asyncio.get_running_loop().time() + route.total
        return _Work(ask, route, targets, equals, deadline)

    def _expected(self, backend: str) -> float:
        return min(self.places.at(backend, one).expected for one in self.backends[backend].places(b""))

    def _permitted(self, work: _Work, number: int) -> Iterator[Candidate]:
        """The places that may be asked in a round, in order; each is asked for permission when its turn comes."""
        for target in work.targets:
            backend = self.backends[target.backend]
            for server in backend.places(work.ask.prefix() if backend.kind == "vllm" else b""):
                place = self.places.at(target.backend, server)
                if place.name in work.out or work.not_before.get(place.name, 0.0) > time.monotonic():
                    continue
                if (permission := place.ask()) is None:
                    continue
                if number == 0:
                    place.retries.sent()
                elif not place.retries.take():  # an overloaded one must not get every request several times
                    place.dropped(permission)
                    continue
                yield Candidate(target, backend, server, place, permission)

    async def _paused(self, work: _Work, number: int) -> bool:
        """Wait before a further round, until somebody may be asked again; False: that is too late, or never."""
        now = time.monotonic()
        waits = [
            max(0.0, work.not_before.get(server.name, 0.0) - now)
            for target in work.targets
            for server in self.backends[target.backend].places(b"")
            if server.name not in work.out
        ]
        if not waits:
            return False
        pause = retry.pause(number, self._draw.random(), min(waits))
        ends = None if work.deadline is None else work.deadline - asyncio.get_running_loop().time()
        if now - work.began + pause > work.route.retry.within or (ends is not None and pause >= ends):
            return False
        await asyncio.sleep(pause)
        return True

    async def _answer(self, first: Candidate, others: Iterator[Candidate], work: _Work) -> tuple[Outcome, Candidate]:
        """What a candidate answers; where the route hedges and it takes long, what the faster of two answers."""
        if work.route.hedge is None:
            return await self._attempt(first, work), first
        tried = partial(self._attempt, work=work)
        outcome, candidate, lost = await first_answer(self._hedges, work.route, work.ask.stream, first, others, tried)
        if lost is not None:
            await self._failed(*lost, work)
        return outcome, candidate

    async def _failed(self, outcome: Outcome, candidate: Candidate, work: _Work) -> None:
        self._metrics.tries_failed.labels(candidate.place.name, outcome.kind).inc()
        log.info("%s: %s", candidate.place.name, outcome.told)
        await work.failed(outcome, candidate)

    async def _attempt(self, candidate: Candidate, work: _Work) -> Outcome:
        try:
            call = self._call(candidate, work)
        except BaseException:
            candidate.place.dropped(candidate.permission)
            raise
        ask, total = work.ask, work.route.total
        target, backend = candidate.target, candidate.backend
        tried = Try(target.backend, (target.model or ask.model, backend.kind, backend.identity))
        candidate.tried, candidate.load = tried, candidate.server.in_flight + 1
        ask.tries.append(tried)
        left = None if work.deadline is None else max(0.0, work.deadline - asyncio.get_running_loop().time())
        fair = left is None or total is None or left >= 0.9 * total  # else others have used the time up
        outcome = await attempt(
            candidate.server, candidate.place, candidate.permission, call, work.route.first_byte, work.deadline, left,
            fair, ours=not ask.tenant.credentials, stream=ask.stream,
        )  # fmt: skip
        if outcome.kind:
            tried.ended = time.monotonic()
            tried.outcome = _outcome(outcome)
        return outcome

    def _call(self, candidate: Candidate, work: _Work) -> Call:
        """The request as a place gets it."""
        target, backend, ask = candidate.target, candidate.backend, work.ask
        key = target.backend, target.model
        if key not in work.bodies:
            work.bodies[key] = self._prepared(target, backend, ask)
        body, candidate.note = work.bodies[key]
        return Call("POST", ask.path, ask.query, self._headers(ask.headers, backend, ask.tenant), body)

    def _prepared(self, target: Target, backend: Backend, ask: Ask) -> tuple[bytes, str]:
        body = ask.body
        if target.model is not None and target.model != ask.model:
            kind = ask.headers.get("content-type", "")
            if ask.fields:
                body = openai_chat.with_model(body, target.model)
            elif forms.is_form(kind):
                body = forms.with_value(body, kind, "model", target.model)
        note, config, style = "", ask.tenant.policy.prompt_cache, backend.prompt_cache
        if config.mode != "off" and ask.path in _STYLES.get(style, ()):
            secret = self.salt(ask.tenant.name).encode()
            prepared = prompt_cache.prepare(body, style, config, secret, self._reuse, time.monotonic())
            body, note = prepared.body, prepared.note
        if backend.kind == "vllm":
            body = vllm.salted(body, self.salt(ask.tenant.name))
        if _asks_for_usage(ask, backend) and not _is_asked_for_usage(ask):
            body = openai_chat.with_usage(body, ask.fields.get("stream_options"))
        return body, note

    def _dispatched(self, outcome: Outcome, candidate: Candidate, work: _Work) -> Dispatched:
        assert outcome.reply is not None
        target, backend = candidate.target, candidate.backend
        model, fallback = target.model or work.ask.model, target not in work.equals
        hides = _asks_for_usage(work.ask, backend) and not _is_asked_for_usage(work.ask)
        if candidate.tried is not None:
            candidate.tried.outcome = outcome.kind  # it is not lost: what it takes is the answer's
        return Dispatched(
            outcome.reply, target.backend, backend.kind, model, fallback, backend.identity, candidate.note,
            load=candidate.load, hides_usage=hides, failed=bool(outcome.kind),
        )  # fmt: skip

    def _nobody(self, targets: Sequence[Target]) -> BackendError:
        places = [
            self.places.at(target.backend, server)
            for target in targets
            for server in self.backends[target.backend].places(b"")
        ]
        wait = min((place.wait() for place in places), default=1.0)
        names = ", ".join(place.name for place in places)
        return NobodyLeft(targets[0].backend, f"fails too often to be asked now ({names})", max(1.0, wait))

    def _headers(self, headers: Mapping[str, str], backend: Backend, tenant: Tenant) -> dict[str, str]:
        sent = {**forwarded(headers), **tenant.credentials}
        if backend.kind == "engine":
            sent["x-hitherto-salt"] = self.salt(tenant.name)
        return sent


def forwarded(headers: Mapping[str, str]) -> dict[str, str]:
    """The client's headers without what belongs to its own connection, its credentials, or us."""
    return {
        name: value
        for name, value in headers.items()
        if name not in _NOT_FORWARDED and not name.startswith("x-hitherto-") and not is_credential(name)
    }


def _outcome(outcome: Outcome) -> str:
    """What became of a try that failed, as it is booked: whoever answers with an error charges nothing."""
    error = outcome.error
    if error is None:
        return f"status-{outcome.reply.status}" if outcome.reply is not None else outcome.kind
    if isinstance(error, BackendInterrupted):
        return "interrupted"
    return "timeout" if isinstance(error, BackendTimeout) and error.connected else "unreachable"


def _asks_for_usage(ask: Ask, backend: Backend) -> bool:
    """Whether a stream is to tell its usage, asked for by its client or not."""
    return ask.stream and backend.asks_for_usage and ask.path in _TOLD_ON_REQUEST


def _is_asked_for_usage(ask: Ask) -> bool:
    options = ask.fields.get("stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True


def _refuse_dot_segments(path: str) -> None:
    """`/v1/../admin` is no path of the API; an upstream that resolves it would be asked outside of its base URL."""
    if any(unquote(segment) in (".", "..") for segment in re.split(r"/|%2f|\\|%5c", path, flags=re.IGNORECASE)):
        raise MalformedRequest(f"the path /v1{path} has . or .. segments")
