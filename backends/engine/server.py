"""The engine as an OpenAI-compatible server: `python -m backends.engine` serves it over a unix socket or TCP."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import uuid
from collections.abc import Sequence as Sequence_
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from backends import asgi
from backends.dialects import openai_chat
from backends.dialects.openai_chat import MalformedRequest
from backends.engine.config import EngineConfig
from backends.engine.doctor import PrefixDoctor
from backends.engine.engine import Engine
from backends.engine.job import Arrival, EngineError, Job, error_body
from backends.engine.load import Loaded
from backends.engine.request import BadRequest, ChatRequest, parse_chat
from backends.engine.sequence import Sequence
from backends.engine.text import TemplateError
from backends.engine.tiers.contract import Tier

log = logging.getLogger("hitherto.engine")

BODY_LIMIT = 32 << 20


class EngineServer:
    """An ASGI application around one engine. `model_name` is what `/v1/models` tells."""

    def __init__(
        self,
        loaded: Loaded,
        config: EngineConfig,
        model_name: str,
        thread: ThreadPoolExecutor,
        tiers: Sequence_[Tier] = (),
    ) -> None:
        self.text = loaded.text
        self.eos = loaded.eos
        self.model_name = model_name
        self.doctor = PrefixDoctor(loaded.text.decode_all)
        self._outbox: list[tuple[asyncio.Queue[Arrival], Arrival]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self.engine = Engine(loaded, config, self._flush, lambda: os._exit(70), thread, tiers)
        self.vocabulary = loaded.vocabulary
        self.info = {
            "dtype": loaded.dtype,
            "context": loaded.context,
            "longest": self.engine.longest,
            "block": config.block,
            "block_bytes": loaded.runner.pool.data[0].nbytes,
            "self_test_difference": loaded.self_test_difference,
        }

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        route = (scope["method"], scope["path"])
        if route == ("POST", "/v1/chat/completions"):
            await self._guarded(self._chat, scope, receive, send)
        elif route in (("GET", "/health"), ("GET", "/v1/state")):
            state = {"status": "ok", **self.info, **dataclasses.asdict(self.engine.stats())}
            await asgi.send_json(send, 200, {**state, "tiers": self.engine.tier_stats()})
        elif route == ("GET", "/v1/doctor"):
            await asgi.send_json(send, 200, self.doctor.report())
        elif route == ("POST", "/v1/kv/purge"):
            await asyncio.wrap_future(self.engine.purge())
            await asgi.send_json(send, 200, {"purged": True})
        elif route == ("GET", "/v1/models"):
            card = {"id": self.model_name, "object": "model", "created": 0, "owned_by": "hitherto"}
            await asgi.send_json(send, 200, {"object": "list", "data": [card]})
        else:
            await _send_error(send, 404, f"{scope['method']} {scope['path']} is not served by the engine")

    async def _lifespan(self, receive: asgi.Receive, send: asgi.Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                self._loop = asyncio.get_running_loop()
                self.engine.start()
                await send({"type": "lifespan.startup.complete"})
            else:
                await asyncio.to_thread(self.engine.stop)
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def _guarded(self, handler: Any, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        try:
            await handler(scope, receive, send)
        except asgi.ClientGone:
            pass
        except asgi.BodyTooLarge:
            await _send_error(send, 413, f"the request body is over {BODY_LIMIT} bytes")
        except MalformedRequest as error:
            await _send_error(send, 400, str(error), error.param)
        except BadRequest as error:
            await _send_error(send, 400, str(error), error.param, error.code)
        except TemplateError as error:
            await _send_error(send, 400, str(error), "messages")
        except EngineError as error:
            await _send_error(send, error.status, str(error))

    async def _chat(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        raw = await asgi.read_body(receive, BODY_LIMIT)
        request = parse_chat(openai_chat.parse(raw))
        tenant_salt = asgi.header_map(scope).get("x-hitherto-salt", "")
        salt = f"{len(tenant_salt)}:{tenant_salt}{request.cache_salt}".removeprefix("0:")
        prompt = await asyncio.to_thread(self._read, request, salt)
        job = Job(self.engine, self.text, request, self._sequences(request, prompt, salt), self.model_name)
        for index, sequence in enumerate(job.sequences):
            self.listen(sequence, job.arrivals, index)
        async with asgi.HangupWatch(receive) as watch:
            watch.start()
            await job.answer(send)
        self.doctor.reused(job.cached)

    def _read(self, request: ChatRequest, salt: str) -> list[int]:
        prompt = self.text.encode_chat(request.messages)
        self.doctor.look(prompt, salt)
        return prompt

    def _sequences(self, request: ChatRequest, prompt: list[int], salt: str) -> list[Sequence]:
        """One sequence for each choice. Raises `BadRequest` where the prompt is not for this model."""
        longest, wanted = self.engine.longest, request.params.max_tokens
        if len(prompt) + max(wanted, 1) > longest:
            raise BadRequest(
                f"this model's maximum context length is {longest} tokens; the prompt has {len(prompt)} and "
                f"max_tokens is {wanted or 'not set'}",
                "messages" if len(prompt) >= longest else "max_tokens",
                "context_length_exceeded",
            )
        if max(prompt) >= self.vocabulary:
            raise BadRequest("messages contain a special token that this model has no embedding for", "messages")
        limit = wanted or longest - len(prompt)
        return [
            Sequence(
                id=uuid.uuid4().hex,
                prompt=prompt,
                params=dataclasses.replace(request.params, max_tokens=limit, seed=(request.params.seed or 0) + index),
                salt=salt,
                eos=self.eos,
            )
            for index in range(request.choices)
        ]

    def listen(self, sequence: Sequence, queue: asyncio.Queue[Arrival], index: int) -> None:
        """Let the emissions of a sequence arrive in `queue`, with its index."""
        sequence.emit = lambda emission: self._outbox.append((queue, (index, emission)))

    def _flush(self) -> None:
        if self._outbox and self._loop is not None:
            batch, self._outbox = self._outbox, []
            self._loop.call_soon_threadsafe(_deliver, batch)


def _deliver(batch: list[tuple[asyncio.Queue[Arrival], Arrival]]) -> None:
    for queue, arrival in batch:
        queue.put_nowait(arrival)


async def _send_error(
    send: asgi.Send, status: int, message: str, param: str | None = None, code: str | None = None
) -> None:
    headers = [(b"retry-after", b"2")] if status == 503 else []
    await asgi.send_json(send, status, {"error": error_body(status, message, param, code)}, headers)
