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
from typing import Any
from urllib.parse import unquote

import orjson

from backends import prompt_cache, vllm
from backends.dialects import openai_chat
from backends.dialects.openai_chat import MalformedRequest
from backends.prompt_cache import Reuse
from backends.protocol import Backend, Call, NobodyLeft, Reply, Server, Usage, View
from backends.upstream import HOP_BY_HOP
from gateway.api.auth import is_credential
from gateway.errors import ModelNotAllowed, Unable, UnknownModel
from gateway.metrics import Metrics
from gateway.places import Place, Places
from gateway.tenant import Tenant
from gateway.tries import Outcome, attempt
from policies import rate_limit, retry, routing
from policies.breaker import Pass
from policies.hedging import Percentile
from policies.redaction import masked
from policies.retry import RetryBudget
from policies.routing import Route, Target

log = logging.getLogger("hitherto.dispatch")

_NOT_FORWARDED = HOP_BY_HOP | {"host", "content-length", "accept-encoding", "expect"}
_AFFINITY_BYTES = 2048
"""Requests that begin with the same so many bytes belong together."""
_MODELS_MOST = 1000


@dataclass(frozen=True, slots=True)
class Ask:
    """A request for a model. `view` is None where the body is of another kind than a chat completion."""

    path: str
    query: str
    headers: Mapping[str, str]
    body: bytes
    model: str
    tenant: Tenant
    view: View | None = None
    answers: bool = True
    """Whether tokens come back; embeddings cost their input only."""

    @property
    def is_stream(self) -> bool:
        return self.view is not None and self.view.stream

    @property
    def max_tokens(self) -> int | None:
        """What the answer may have at most, if the request says."""
        if not self.answers:
            return 0
        fields = self.view.scope_fields if self.view is not None else {}
        value = fields.get("max_completion_tokens", fields.get("max_tokens"))
        return value if isinstance(value, int) and not isinstance(value, bool) else None


def _unsettled(usage: Usage | None, body: int) -> None: ...


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
    settle: Callable[[Usage | None, int], None] = _unsettled
    """Tell at the end, once, what it took: tokens where they are known, and bytes of the body."""

    @property
    def priced(self) -> tuple[str, str, str]:
        """What the price depends on: the model, the kind of backend, its URL."""
        return self.model, self.kind, self.identity


@dataclass(slots=True)
class _Candidate:
    """One place that may be asked."""

    target: Target
    backend: Backend
    server: Server
    place: Place
    permission: Pass
    fallback: bool
    note: str = ""


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
        self._paces: dict[tuple[str, bool], Percentile] = {}
        self._hedges: dict[int, RetryBudget] = {}
        self._reuse = Reuse()

    def route(self, model: str, tenant: Tenant) -> Route:
        """Where a model may run for a tenant. Raises `ModelNotAllowed` or `UnknownModel`."""
        policy = tenant.policy
        if policy.models != ("*",) and not routing.allows(policy.models, model):
            raise ModelNotAllowed(f"the model {model!r} is not one of yours; GET /v1/models lists those")
        for table in (policy.routes, self.routes):
            if table and (entry := routing.match(model, table)) is not None:
                return table[entry]
        raise UnknownModel(f"the model {model!r} does not exist here; GET /v1/models lists those that do")

    def identity(self, model: str, tenant: Tenant) -> tuple[str, str, str]:
        """What decides the answer beside the request: backends, their identities, the model there.

        Equals that share the load are one: any of them gives the answer.
        """
        equals = self.route(model, tenant).equals
        if len(equals) == 1:
            target = equals[0]
            return target.backend, self.backends[target.backend].identity, target.model or model
        each = sorted((one.backend, self.backends[one.backend].identity, one.model or model) for one in equals)
        backends, identities, models = (list(part) for part in zip(*each, strict=True))
        return "+".join(backends), orjson.dumps(identities).decode(), orjson.dumps(models).decode()

    def priced(self, ask: Ask, name: str = "") -> tuple[str, str, str]:
        """What the price of a request probably depends on: as `Dispatched.priced`, of a backend or of the first
        candidate."""
        target = Target(name) if name else self.route(ask.model, ask.tenant).targets[0]
        backend = self.backends[target.backend]
        return target.model or ask.model, backend.kind, backend.identity

    async def open(self, ask: Ask) -> Dispatched:
        """The first candidate that answers, or the last failure. Raises a `BackendError` or `Unable`."""
        route = self.route(ask.model, ask.tenant)
        targets, affinity = self._targets(route, ask)
        began, loop = time.monotonic(), asyncio.get_running_loop()
        deadline = None if route.total is None else loop.time() + route.total
        last: tuple[Outcome, _Candidate] | None = None
        for number in range(route.retry.attempts):
            if number:
                assert last is not None
                pause = retry.pause(number, self._draw.random(), last[0].wait)
                if time.monotonic() - began + pause > route.retry.within or _is_late(deadline, pause):
                    break
                await asyncio.sleep(pause)
            tried = False
            waiting = self._permitted(targets, route, affinity, number)
            for candidate in waiting:
                tried = True
                outcome, candidate = await self._raced(candidate, waiting, route, ask, deadline)
                if last is not None:
                    await last[0].drop()
                if outcome.kind in ("", "final"):
                    return self._dispatched(outcome, candidate, ask)
                last = outcome, candidate
                self._metrics.tries_failed.labels(candidate.place.name, outcome.kind).inc()
                log.info("%s: %s", candidate.place.name, outcome.told)
                if _is_late(deadline, 0.0):
                    break
            if not tried or (last is not None and last[0].kind == "too-long"):
                break  # what is too long will not get shorter
        if last is None:
            raise self._nobody(targets)
        if last[0].error is not None:
            raise last[0].error
        return self._dispatched(*last, ask)

    async def relay(self, backend: str, method: str, ask: Ask) -> Dispatched:
        """Pass any other request on as it is. Raises a `BackendError`."""
        _refuse_dot_segments(ask.path)
        target = self.backends[backend]
        call = Call(method, ask.path, ask.query, self._headers(ask.headers, target, ask.tenant), ask.body)
        reply = await target.places(b"")[0].open(call)
        return Dispatched(reply, backend, target.kind, ask.model, False, target.identity)

    def salt(self, tenant: Tenant) -> str:
        """Prefix KV is as private as answers are. Keyed, so that a tenant's name cannot be guessed into its salt."""
        return hmac.new(self._salt_key, tenant.name.encode(), hashlib.sha256).hexdigest()

    def redaction(self, tenant: Tenant) -> Callable[[str], str | None] | None:
        """What of a text may be stored for a tenant; None: all of it."""
        rules = tenant.policy.redaction
        if not rules.text:
            return lambda text: None
        key = self._salt_key
        return (lambda text: masked(text, rules.mask, key + tenant.name.encode())) if rules.mask else None

    def _targets(self, route: Route, ask: Ask) -> tuple[list[Target], bytes]:
        """Who can answer, in the order in which they are asked; and what the request begins with, as a hash."""
        targets = list(route.targets)
        if any(target.lacks or target.context for target in targets):
            wanted = routing.needs(ask.view) if ask.view is not None else frozenset()
            tokens = rate_limit.estimate(len(ask.body), ask.max_tokens)
            targets, why = routing.able(targets, wanted, tokens)
            if not targets:
                raise Unable(f"no backend of the model {ask.model!r} can answer this: {why}")
        several = len(route.equals) > 1
        affinity = b""
        if several or any(self.backends[target.backend].kind == "vllm" for target in targets):
            affinity = self._affinity(ask)
        if several:
            pace = {one.backend: self._expected(one.backend) for one in targets} if route.choose == "fastest" else {}
            targets = routing.in_order(targets, route.choose, affinity, self._draw, pace)
        return targets, affinity

    def _affinity(self, ask: Ask) -> bytes:
        """What a request begins with, so that those that begin alike meet where it is cached."""
        view = ask.view
        beginning = ask.body[:_AFFINITY_BYTES]
        if view is not None:
            messages = list(view.scope_fields.get("messages") or ())
            roles = [message.get("role") for message in messages]
            end = roles.index("user") + 1 if "user" in roles else len(messages)
            said = [(message.get("role"), _text(message.get("content"))) for message in messages[:end]]
            if said and end == len(messages) and view.question is not None:  # which was taken out of its message
                said[-1] = said[-1][0], view.question
            beginning = orjson.dumps([view.scope_fields.get("tools"), said])[:_AFFINITY_BYTES]
        return hashlib.blake2b(f"{ask.tenant.name}\0{ask.model}\0".encode() + beginning, digest_size=16).digest()

    def _expected(self, backend: str) -> float:
        return min(self.places.at(backend, one.name).expected for one in self.backends[backend].places(b""))

    def _permitted(self, targets: Sequence[Target], route: Route, affinity: bytes, number: int) -> Iterator[_Candidate]:
        """The places that may be asked in a round, in order; each is asked for permission when its turn comes."""
        for target in targets:
            backend = self.backends[target.backend]
            for server in backend.places(affinity):
                place = self.places.at(target.backend, server.name)
                if number == 0:
                    place.retries.sent()
                elif not place.retries.take():
                    continue  # an overloaded one must not get every request several times
                permission = place.ask()
                if permission is not None:
                    yield _Candidate(target, backend, server, place, permission, target not in route.equals)

    async def _raced(
        self, first: _Candidate, others: Iterator[_Candidate], route: Route, ask: Ask, deadline: float | None
    ) -> tuple[Outcome, _Candidate]:
        """What a candidate answers; where the route hedges and it takes long, what the faster of two answers."""
        delay = self._hedge_delay(route, ask)
        if delay is None:
            return await self._attempt(first, route, ask, deadline), first
        running = {asyncio.create_task(self._attempt(first, route, ask, deadline)): first}
        try:
            done, _ = await asyncio.wait(running, timeout=delay)
            if not done and self._may_hedge(route, ask) and (second := next(others, None)) is not None:
                running[asyncio.create_task(self._attempt(second, route, ask, deadline))] = second
            while True:
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                task = done.pop()
                candidate, outcome = running.pop(task), task.result()
                if outcome.kind in ("", "final") or not running:
                    if candidate is not first:
                        self._metrics.hedges.labels("won").inc()
                    return outcome, candidate
                await outcome.drop()
        finally:
            for task in running:
                task.cancel()
            for late in await asyncio.gather(*running, return_exceptions=True):
                if isinstance(late, Outcome):
                    await late.drop()

    async def _attempt(self, candidate: _Candidate, route: Route, ask: Ask, deadline: float | None) -> Outcome:
        try:
            call, candidate.note = self._call(candidate, ask)
        except BaseException:
            candidate.place.dropped(candidate.permission)
            raise
        limit = route.first_byte
        if deadline is not None:
            left = max(0.001, deadline - asyncio.get_running_loop().time())
            limit = left if limit is None else min(limit, left)
        began = time.monotonic()
        ours = not ask.tenant.credentials
        outcome = await attempt(candidate.server, candidate.place, candidate.permission, call, limit, deadline, ours)
        if not outcome.kind and route.hedge is not None:
            self._pace(ask).add(time.monotonic() - began)
        return outcome

    def _call(self, candidate: _Candidate, ask: Ask) -> tuple[Call, str]:
        """The request as a place gets it, and what was done for the provider's prompt cache."""
        target, backend = candidate.target, candidate.backend
        body = ask.body if target.model in (None, ask.model) else openai_chat.with_model(ask.body, str(target.model))
        note = ""
        if ask.tenant.policy.prompt_cache.mode != "off" and backend.prompt_cache != "none":
            secret = self.salt(ask.tenant).encode()
            prepared = prompt_cache.prepare(
                body, backend.prompt_cache, ask.tenant.policy.prompt_cache, secret, self._reuse, time.monotonic()
            )
            body, note = prepared.body, prepared.note
        if backend.kind == "vllm":
            body = vllm.salted(body, self.salt(ask.tenant))
        return Call("POST", ask.path, ask.query, self._headers(ask.headers, backend, ask.tenant), body), note

    def _dispatched(self, outcome: Outcome, candidate: _Candidate, ask: Ask) -> Dispatched:
        assert outcome.reply is not None
        target, backend = candidate.target, candidate.backend
        model = target.model or ask.model
        return Dispatched(
            outcome.reply, target.backend, backend.kind, model, candidate.fallback, backend.identity, candidate.note
        )

    def _nobody(self, targets: Sequence[Target]) -> NobodyLeft:
        places = [
            self.places.at(target.backend, server.name)
            for target in targets
            for server in self.backends[target.backend].places(b"")
        ]
        wait = min((place.wait() for place in places), default=1.0)
        names = ", ".join(place.name for place in places)
        return NobodyLeft(targets[0].backend, f"fails too often to be asked now ({names})", max(1.0, wait))

    def _pace(self, ask: Ask) -> Percentile:
        key = ask.model, ask.is_stream
        if key not in self._paces and len(self._paces) > _MODELS_MOST:
            self._paces.clear()  # names that match a pattern are the clients' choice
        return self._paces.setdefault(key, Percentile())

    def _hedge_delay(self, route: Route, ask: Ask) -> float | None:
        if route.hedge is None:
            return None
        self._hedge_budget(route).sent()
        return self._pace(ask).p95 if route.hedge.after == "p95" else route.hedge.after

    def _hedge_budget(self, route: Route) -> RetryBudget:
        """A share of the route's requests; the first one may be sent when that is one."""
        assert route.hedge is not None
        return self._hedges.setdefault(id(route), RetryBudget(route.hedge.extra, 10.0, 0.0))

    def _may_hedge(self, route: Route, ask: Ask) -> bool:
        allowed = self._hedge_budget(route).take()
        self._metrics.hedges.labels("sent" if allowed else "not-allowed").inc()
        return allowed

    def _headers(self, headers: Mapping[str, str], backend: Backend, tenant: Tenant) -> dict[str, str]:
        sent = {**forwarded(headers), **tenant.credentials}
        if backend.kind == "engine":
            sent["x-hitherto-salt"] = self.salt(tenant)
        return sent


def _text(content: Any) -> Any:
    """The same for one text, whether it comes as a string or in parts."""
    if not isinstance(content, list):
        return content
    texts = [part.get("text") if isinstance(part, dict) else None for part in content]
    return content if None in texts else "".join(map(str, texts))


def _is_late(deadline: float | None, pause: float) -> bool:
    return deadline is not None and asyncio.get_running_loop().time() + pause >= deadline


def forwarded(headers: Mapping[str, str]) -> dict[str, str]:
    """The client's headers without what belongs to its own connection, its credentials, or us."""
    return {
        name: value
        for name, value in headers.items()
        if name not in _NOT_FORWARDED and not name.startswith("x-hitherto-") and not is_credential(name)
    }


def _refuse_dot_segments(path: str) -> None:
    """`/v1/../admin` is no path of the API; an upstream that resolves it would be asked outside of its base URL."""
    if any(unquote(segment) in (".", "..") for segment in re.split(r"/|%2f|\\|%5c", path, flags=re.IGNORECASE)):
        raise MalformedRequest(f"the path /v1{path} has . or .. segments")
