"""`POST /v1/embeddings`: each input from the cache if it is there, the others from where the model runs."""

from __future__ import annotations

import time

import orjson

from backends.protocol import Answer, BackendError, Usage
from gateway.api.endpoint import Endpoint
from gateway.api.passthrough import Passthrough
from gateway.cache import embeddings
from gateway.cache.answers import Answers
from gateway.dispatch import Dispatch, Dispatched, forwarded
from gateway.errors import NotCached
from gateway.exchange import COPY_LIMIT, Incoming, Served
from gateway.metrics import Metrics
from policies.cacheability import CacheRules
from policies.controls import parse_controls


class EmbeddingsEndpoint(Endpoint):
    """Embeddings go through the exact answer cache, input by input; what cannot be taken apart is relayed as it is."""

    surface = embeddings.SURFACE

    def __init__(
        self, answers: Answers, dispatch: Dispatch, rules: CacheRules, passthrough: Passthrough, metrics: Metrics
    ) -> None:
        super().__init__(passthrough.auth, metrics, passthrough.body_limit)
        self._answers, self._dispatch, self._rules, self._passthrough = answers, dispatch, rules, passthrough

    async def serve(self, request: Incoming) -> Served:
        started = time.perf_counter()
        try:
            body = orjson.loads(request.body)
        except orjson.JSONDecodeError:
            body = None
        inputs = embeddings.inputs_of(body)
        if inputs is None or body is None:
            return await self._passthrough.serve(request)
        controls = parse_controls(request.headers)
        target = self._dispatch.identity(body["model"])
        headers, tenant = forwarded(request.headers), request.tenant.name
        asked = embeddings.batch(body, inputs, tenant, target, headers, request.query, controls, self._rules)
        found = await embeddings.known(self._answers, asked)
        places = embeddings.missing(asked, found)
        if not places:
            return self._response(asked, embeddings.merged(asked, found, [], [], {}), "exact", "", started)
        if controls.only_if_cached:
            raise NotCached(f"only-if-cached: {len(places)} of {len(inputs)} inputs are not stored")
        overhead = time.perf_counter() - started
        request.watch.start()
        alone = len(places) == len(inputs)
        raw = request.body if alone else asked.body(places)
        dispatched = await self._dispatch.open(
            "/embeddings", request.query, request.headers, raw, asked.model, request.tenant
        )
        served = await self._computed(asked, found, places, dispatched, alone, started)
        served.overhead = overhead
        return served

    async def _computed(
        self,
        asked: embeddings.Batch,
        found: list[bytes | None],
        places: list[int],
        dispatched: Dispatched,
        alone: bool,
        started: float,
    ) -> Served:
        reply = dispatched.reply
        try:
            copy = b"".join([chunk async for chunk in reply.chunks()])
        finally:
            await reply.close()
        result = embeddings.computed(copy, len(places)) if reply.status == 200 and len(copy) <= COPY_LIMIT else None
        if result is None and not alone and reply.status == 200:
            raise BackendError(dispatched.backend, f"no {len(places)} embeddings for {len(places)} inputs")
        reason = f"{sum(body is not None for body in found)}-of-{len(found)}-known"
        if result is None:  # an error, or something that only the client may understand
            served = self._response(asked, copy, "miss", reason, started)
            served.status, served.stored = reply.status, f"status-{reply.status}"
            kept = (b"retry-after", b"content-type")
            served.headers = [pair for pair in reply.headers if pair[0] in kept] + served.headers[1:]
        else:
            rest, bodies = result
            whole = copy if alone else embeddings.merged(asked, found, places, bodies, rest)
            served = self._response(asked, whole, "miss", reason, started)
            served.stored = "fallback" if dispatched.fallback else self._kept(asked, places, bodies, dispatched.backend)
            usage = rest.get("usage")
            if isinstance(usage, dict) and isinstance(usage.get("prompt_tokens"), int):
                served.answer = Answer({}, (), Usage(usage["prompt_tokens"], 0))
        served.backend, served.backend_kind = dispatched.backend, dispatched.kind
        served.headers.append((b"x-hitherto-backend", dispatched.backend.encode()))
        return served

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
