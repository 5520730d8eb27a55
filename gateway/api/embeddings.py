"""`POST /v1/embeddings`: each input from the cache if it is there, the others from where the model runs."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from backends.dialects.openai_chat import MalformedRequest
from backends.protocol import Usage
from gateway.api.endpoint import Endpoint
from gateway.api.passthrough import Passthrough
from gateway.ask import Ask
from gateway.cache import embeddings
from gateway.cache.answers import Answers
from gateway.dispatch import Dispatch, Dispatched, Told, forwarded
from gateway.errors import NotCached
from gateway.exchange import Incoming, Served, Ticket
from policies.controls import is_litellm_control, parse_controls

LIMIT = 64 << 20
"""Longer answers are passed on, but not remembered."""


class EmbeddingsEndpoint(Endpoint):
    """Embeddings go through the exact answer cache, input by input; what cannot be taken apart is relayed as it is."""

    surface = embeddings.SURFACE

    def __init__(self, answers: Answers, dispatch: Dispatch, passthrough: Passthrough) -> None:
        super().__init__(passthrough.door)
        self._answers, self._dispatch, self._passthrough = answers, dispatch, passthrough

    async def serve(self, request: Incoming) -> Served:
        started = time.perf_counter()
        sent, downgraded = await self.door.admission.afford(request)
        try:
            body = orjson.loads(sent)
        except orjson.JSONDecodeError:
            body = None
        inputs = embeddings.inputs_of(body)
        if inputs is None or body is None:
            return await self._passthrough.serve(request)
        request.body = sent
        controls = parse_controls(request.headers, body.get("cache"))
        ours = is_litellm_control(body.get("cache"))
        if ours:
            body = {name: value for name, value in body.items() if name != "cache"}
        tenant, headers = request.tenant, forwarded(request.headers)
        user = tenant.user(request.headers, body)
        target = self._dispatch.identity(self._ask(request, request.body, body))
        ticket = await self.door.admission.enter(request, user, body["model"], downgraded, controls.tags)
        try:
            asked = embeddings.batch(body, inputs, tenant, user, target, headers, request.query, controls)
        except (TypeError, RecursionError) as error:
            raise MalformedRequest("the body is nested too deeply") from error
        found = await embeddings.known(self._answers, asked)
        places = embeddings.missing(asked, found)
        if not places:
            served = self._response(asked, embeddings.merged(asked, found, [], [], {}), "exact", "", started)
            self._avoided(served, asked, range(len(inputs)), request)
            self.door.admission.books.tell_saving(ticket, served)
            return served
        if controls.only_if_cached:
            raise NotCached(f"only-if-cached: {len(places)} of {len(inputs)} inputs are not stored")
        overhead = time.perf_counter() - started
        request.watch.start()
        raw = orjson.dumps(body) if ours else request.body
        served = await self._computed(asked, found, places, request, ticket, raw, started)
        served.overhead = overhead
        return served

    async def _computed(
        self,
        asked: embeddings.Batch,
        found: list[bytes | None],
        places: list[int],
        request: Incoming,
        ticket: Ticket,
        raw: bytes,
        started: float,
    ) -> Served:
        part = raw if len(places) == len(found) else asked.body(places)
        dispatched, copy = await self._asked(asked, request, ticket, part)
        result = await self._read(dispatched, copy, len(places))
        if result is None and dispatched.reply.status == 200 and len(places) < len(found):
            # Not what was expected for a part of the inputs: the client shall have the answer to what it asked.
            places = list(range(len(found)))
            dispatched, copy = await self._asked(asked, request, ticket, raw)
            result = await self._read(dispatched, copy, len(places))
        known = sum(body is not None for body in found) if len(places) < len(found) else 0
        reason = f"{known}-of-{len(found)}-known"
        whole = copy
        if result is not None and len(places) < len(found):
            whole = await asyncio.to_thread(embeddings.merged, asked, found, places, result[1], result[0])
        served = self._response(asked, whole, "miss", reason, started)
        ours = [b"content-length", b"date", b"x-request-id"]
        if whole is copy:
            served.headers = [pair for pair in served.headers if pair[0] != b"content-type"]
        else:
            ours += [b"content-type", b"content-encoding"]
        served.headers += [pair for pair in dispatched.headers() if pair[0] not in ours]
        served.status = dispatched.reply.status
        served.stored = "unfit" if served.status == 200 else f"status-{served.status}"
        if result is not None:
            served.stored = (
                "fallback" if dispatched.fallback else self._kept(asked, places, result[1], dispatched.backend)
            )
        self._avoided(served, asked, (place for place, body in enumerate(found) if body and known), request)
        served.headers += dispatched.settle(Told(None))  # which was told before; it says again what it cost
        served.backend, served.backend_kind, served.priced = dispatched.backend, dispatched.kind, dispatched.priced
        served.headers.append((b"x-hitherto-backend", dispatched.backend.encode()))
        return served

    async def _read(self, dispatched: Dispatched, copy: bytes, count: int) -> tuple[dict[str, Any], list[bytes]] | None:
        """What a backend computed, taken apart in a thread where it is much; None if it is unfit or too much."""
        if dispatched.reply.status != 200 or len(copy) > LIMIT:
            return None
        if len(copy) < 1 << 18:
            return embeddings.computed(copy, count)
        return await asyncio.to_thread(embeddings.computed, copy, count)

    def _avoided(self, served: Served, asked: embeddings.Batch, places: Iterable[int], request: Incoming) -> None:
        """What inputs that were known make unnecessary; guessed, since nobody told the tokens of one input."""
        served.priced = self._dispatch.priced(self._ask(request, b"", asked.fields))
        inputs = [asked.inputs[place] for place in places]
        tokens = sum(map(_tokens, inputs))
        served.avoided = Usage(tokens, 0) if tokens else None

    async def _asked(
        self, asked: embeddings.Batch, request: Incoming, ticket: Ticket, raw: bytes
    ) -> tuple[Dispatched, bytes]:
        """A backend's whole response."""
        ask = self._ask(request, raw, asked.fields)
        dispatched = await self.door.admission.open(ticket, ask)
        copy = b""
        try:
            copy = b"".join([chunk async for chunk in dispatched.reply.chunks()])
            return dispatched, copy
        finally:
            dispatched.settle(Told(_usage(copy) if len(copy) <= LIMIT else None))
            await dispatched.reply.close()

    def _ask(self, request: Incoming, raw: bytes, fields: Mapping[str, Any]) -> Ask:
        return Ask("/embeddings", request.query, request.headers, raw, fields["model"], request.tenant, fields)

    def _kept(self, asked: embeddings.Batch, places: list[int], bodies: list[bytes], backend: str) -> str:
        try:
            return embeddings.remember(self._answers, asked, places, bodies, backend) or "stored"
        except Exception:
            self._answers.fault("remember")
            return "fault"

    def _response(self, asked: embeddings.Batch, body: bytes, cache: str, reason: str, started: float) -> Served:
        headers = [
            (b"content-type", b"application/json"),
            (b"x-hitherto-cache", cache.encode()),
            (b"x-hitherto-model", asked.model.encode("latin-1", "replace")),
        ]
        if reason:
            headers.append((b"x-hitherto-reason", reason.encode()))
        served = Served(200, headers, body, model=asked.model, cache=cache, reason=reason, started=started)
        served.tenant = asked.questions[0].tenant
        served.overhead = time.perf_counter() - started
        return served


def _tokens(one: Any) -> int:
    """About how many an input has."""
    return len(one) if isinstance(one, list) else max(1, len(str(one)) // 4)


_USAGE = re.compile(rb'"prompt_tokens"\s*:\s*(\d{1,12})(?!\d)')


def _usage(body: bytes) -> Usage | None:
    """What a response says of its tokens, without reading all its numbers."""
    found = _USAGE.search(body[-4096:]) or _USAGE.search(body[:4096])
    return Usage(int(found[1]), 0) if found is not None else None
