"""The life of a request, in order: understand it, look it up, compute it, remember it, say what happened."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial

import orjson

from backends.dialects import openai_chat
from backends.dialects.openai_chat import MalformedRequest
from backends.protocol import BackendError
from gateway.api.auth import Tenant
from gateway.cache.answers import Answers
from gateway.cache.key import Scope, key_digest
from gateway.cache.lease import PATIENCE, Leases
from gateway.cache.lookup import Lookup
from gateway.cache.question import Question
from gateway.cache.replay import replay
from gateway.dispatch import Dispatch, Dispatched, forwarded
from gateway.errors import NotCached
from gateway.exchange import Incoming, Served
from gateway.flights import Flights, Key
from gateway.relay import following, relayed
from gateway.templates import Templates
from policies.cacheability import CacheRules, may_read, wants_variety
from policies.controls import is_litellm_control, parse_controls

_TRANSIENT = frozenset({408, 429, 500, 502, 503, 504, 529})


class Pipeline:
    """Serves one chat request at a time, any number at once."""

    def __init__(self, answers: Answers, dispatch: Dispatch, rules: CacheRules, templates: Templates) -> None:
        self._answers, self._dispatch, self._rules, self._templates = answers, dispatch, rules, templates
        self._flights: Flights[Served] = Flights()
        self._leases = Leases(answers)
        self._refreshing: dict[bytes, asyncio.Task[None]] = {}

    async def serve(self, request: Incoming) -> Served:
        """The answer to a chat completion request, from the cache or a backend. Raises what `errors` has a word for."""
        started = time.perf_counter()
        raw, question, scope, shape = self.understood(request.headers, request.body, request.query, request.tenant)
        lookup = await self._answers.lookup(question)
        flying = _Computation(self, request, question, lookup, raw, scope, shape, started)
        if lookup.entry is not None:
            if (served := flying.replayed(lookup)) is not None:
                if lookup.tier == "stale":
                    self._refresh(flying)
                return served
            flying.lookup = lookup = Lookup("miss", "fault")
        if question.controls.only_if_cached:
            raise NotCached(f"only-if-cached: no stored answer ({lookup.reason})")
        overhead = time.perf_counter() - started
        request.watch.start()
        served = await self._computed_or_stale(flying)
        served.overhead = overhead
        return served

    def understood(
        self, headers: dict[str, str], sent: bytes, query: str, tenant: Tenant
    ) -> tuple[bytes, Question, Scope, bytes]:
        """The body for the backend, what is asked, what decides the answer beside that, and the stream's options."""
        body, raw = self._templates.applied(openai_chat.parse(sent), sent, headers)
        controls = parse_controls(headers, body.get("cache"))
        ours = is_litellm_control(body.get("cache"))
        if ours:
            body = {name: value for name, value in body.items() if name != "cache"}
        view = openai_chat.view(body)
        target = self._dispatch.identity(view.model)
        scope = Scope(view, tenant.name, target, forwarded(headers), query, controls.namespace)
        try:
            digest = scope.digest()
            options = orjson.dumps(body.get("stream_options"), option=orjson.OPT_SORT_KEYS)
            raw = orjson.dumps(body) if ours else raw
        except (TypeError, RecursionError) as error:  # more than 254 levels: nothing that a model was ever asked
            raise MalformedRequest("the body is nested too deeply") from error
        key = key_digest(digest, view.question)
        if wants_variety(view, self._rules):
            key = key_digest(digest, view.question, self._answers.turn(key, self._rules.buckets))
        return raw, Question(key, digest, tenant.name, view, controls, self._rules), scope, options

    async def close(self) -> None:
        """Let the refreshing of stale answers go."""
        for task in list(self._refreshing.values()):
            task.cancel()
        await asyncio.gather(*self._refreshing.values(), return_exceptions=True)
        await self._leases.close()

    async def _computed_or_stale(self, flying: _Computation) -> Served:
        """What a backend says, or an old answer if none can say anything and the rules allow it."""
        try:
            served = await self._computed(flying)
        except BackendError:
            if (old := await self._stale(flying)) is None:
                raise
            return old
        if served.status in _TRANSIENT:
            try:
                old = await self._stale(flying)
            except BaseException:  # the client has left
                await _let_go(served)
                raise
            if old is not None:
                await _let_go(served)
                return old
        return served

    async def _stale(self, flying: _Computation) -> Served | None:
        entry = await self._answers.stale(flying.question)
        return flying.replayed(Lookup("stale", entry=entry)) if entry is not None else None

    async def _computed(self, flying: _Computation) -> Served:
        if not flying.shareable:
            return flying.served(await flying.open())
        return await self._shared(flying)

    async def _shared(self, flying: _Computation) -> Served:
        """The answer that an identical request is getting just now, or one of our own that others may share.

        Whoever follows a request that fails tries once more, one for all of them; a second failure is theirs too, but
        for refusals: what is wrong with a request may stand in a field that does not decide the answer.
        """
        key, again, reason = flying.key, True, "collapsed"
        if self._flights.find(key) is None:
            if (served := await self._in_another_shape(flying)) is not None:
                return served
            if (near := await self._near(flying)) is not None:
                key, reason = near, "collapsed-near"
        while (flight := self._flights.find(key)) is not None:
            try:
                leader = await flight.head()
            except BackendError:
                if not again:
                    raise
                again = False
                continue
            if leader.status < 400 or (not again and leader.status in _TRANSIENT):
                self._answers.metrics.flights.labels("follower").inc()
                served = following(leader, flying.started, reason)
                served.chunks = flight.ride()
                return served
            await flight.leave()
            if not again:
                return flying.served(await flying.open())
            again = False
        return await self._led(flying)

    async def _in_another_shape(self, flying: _Computation) -> Served | None:
        """The same answer, asked for as JSON and as a stream: whoever comes second gets it when it is stored."""
        found = self._flights.otherwise(flying.key)
        view = flying.question.view
        if found is None:
            return None
        (streamed, options), flight = found
        if streamed and b'"include_usage":true' not in options and (view.include_usage or not view.stream):
            return None  # what comes will not tell the usage that this one must have
        try:
            async with asyncio.timeout(PATIENCE):
                await flight.over.wait()
        except TimeoutError:
            return None
        entry = await self._answers.again(flying.question)
        served = flying.replayed(Lookup("exact", entry=entry)) if entry is not None else None
        if served is not None:
            self._answers.metrics.flights.labels("follower").inc()
        return served

    async def _led(self, flying: _Computation) -> Served:
        flight = self._flights.start(flying.key, flying.opening(self._leases))
        self._announce(flying)
        self._answers.metrics.flights.labels("leader").inc()
        served = await flight.head()
        if served.status >= 400:
            flight.close()
        served.chunks = flight.ride()
        return served

    def _announce(self, flying: _Computation) -> None:
        """Let nearly identical questions know of this one, where they may share its answer."""
        question = flying.question
        if question.rules.share_near and flying.semantic:
            flying.lookup.neighbours = flying.lookup.neighbours or self._answers.vector(question)
            under_way = partial(self._is_under_way, flying.key)
            self._answers.asking.add(question, flying.key, flying.lookup.neighbours, under_way)

    def _is_under_way(self, key: Key) -> bool:
        return self._flights.find(key) is not None

    async def _near(self, flying: _Computation) -> Key | None:
        """The key of a nearly identical question whose answer is under way."""
        question, asking = flying.question, self._answers.asking
        if not (question.rules.share_near and flying.semantic) or not asking.any(question.scope):
            return None
        flying.lookup.neighbours = flying.lookup.neighbours or self._answers.vector(question)
        if flying.lookup.neighbours is None:
            return None
        denies = partial(self._answers.denies, question)
        found = await asking.nearest(question, flying.key[1], flying.lookup.neighbours, denies)
        return found if found is not None and self._flights.find(found) is not None else None

    def _refresh(self, flying: _Computation) -> None:
        """Compute a fresh answer behind the back of somebody who has got a stale one, once at a time."""
        key, controls = flying.question.key, flying.question.controls
        if controls.no_store or controls.ttl == 0:
            return  # the fresh answer would not be kept
        if key in self._refreshing or self._flights.find(flying.key) is not None:
            return
        flying.lookup = Lookup("miss", "revalidate")
        flying.question = replace(flying.question, controls=replace(flying.question.controls, no_cache=True))

        async def fetch() -> None:
            try:
                served = await self._led(flying)
                assert served.chunks is not None
                async with aclosing(served.chunks) as chunks:
                    async for _ in chunks:
                        pass
            except BackendError:
                pass  # the stale answer goes on serving for as long as it may
            except Exception:
                self._answers.fault("revalidate")
            finally:
                self._refreshing.pop(key, None)

        self._refreshing[key] = asyncio.create_task(fetch())


class _Computation:
    """What it takes to have one request answered by a backend."""

    def __init__(
        self,
        pipeline: Pipeline,
        request: Incoming,
        question: Question,
        lookup: Lookup,
        raw: bytes,
        scope: Scope,
        options: bytes,
        started: float,
    ) -> None:
        self.question, self.lookup, self.started = question, lookup, started
        self._answers, self._scope = pipeline._answers, scope
        self.open: Callable[[], Awaitable[Dispatched]] = partial(
            pipeline._dispatch.open,
            "/chat/completions",
            request.query,
            request.headers,
            raw,
            question.view.model,
            request.tenant,
        )
        self.key: Key = (question.key, (question.view.stream, options))

    @property
    def semantic(self) -> bool:
        """Whether another wording's answer would do."""
        return may_read(self.question.view, self.question.rules, self.question.controls).semantic

    @property
    def shareable(self) -> bool:
        """Whether others may have the answer while it is under way."""
        controls = self.question.controls
        wanted_fresh = controls.no_store or controls.max_age is not None or controls.ttl is not None
        return self.lookup.tier == "miss" and not wanted_fresh

    def served(self, dispatched: Dispatched) -> Served:
        """A backend's response as ours."""
        return relayed(self._answers, self.question, self.lookup, dispatched, self.started, self._scope.parts)

    async def opening(self, leases: Leases) -> tuple[Served, AsyncGenerator[bytes, None]]:
        """Open the response, unless somebody with whom the store is shared is getting or has got the answer."""
        holder, entry = await leases.acquire(self.question)
        if entry is not None and (served := self.replayed(Lookup("exact", entry=entry))) is not None:
            body, served.body = served.body, None  # as one that arrives
            return served, _one(body or b"")
        try:
            served = self.served(await self.open())
        except BaseException:
            leases.release(self.question, holder)
            raise
        assert served.chunks is not None
        return served, leases.while_read(self.question, holder, served.chunks)

    def replayed(self, lookup: Lookup) -> Served | None:
        """A stored answer as ours; None if it cannot be read."""
        try:
            return replay(self.question, lookup, self.started)
        except Exception:  # an unreadable entry is a miss like any other cache fault
            self._answers.fault("replay")
            return None


async def _let_go(served: Served) -> None:
    """Give up a response that nobody will read."""
    if served.chunks is not None:
        try:
            await served.chunks.aclose()
        except BackendError:
            pass


async def _one(body: bytes) -> AsyncGenerator[bytes, None]:
    yield body
