"""The engine as an OpenAI-compatible server: `python -m backends.engine` serves it over a unix socket or TCP."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import os
import time
import uuid
from collections.abc import Callable
from collections.abc import Sequence as Sequence_
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from backends import asgi
from backends.dialects import openai_chat
from backends.dialects.openai_chat import MalformedRequest
from backends.engine.config import EngineConfig
from backends.engine.doctor import PrefixDoctor
from backends.engine.engine import Engine, EngineFull
from backends.engine.grammar import Grammars, calls_grammar, json_grammar
from backends.engine.hot import HotPrefixes
from backends.engine.job import Arrival, Choice, EngineError, Job
from backends.engine.load import Loaded
from backends.engine.request import (
    BadRequest,
    ChatRequest,
    CompletionRequest,
    Wanted,
    parse_chat,
    parse_completion,
)
from backends.engine.responses import ChatShape, CompletionShape, error_body
from backends.engine.sequence import Constraint, SamplingParams, Sequence
from backends.engine.text import TemplateError
from backends.engine.tiers.contract import Tier
from backends.engine.tools import ToolCalls, arguments_schemas

log = logging.getLogger("hitherto.engine")

BODY_LIMIT = 32 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: the tenant as the gateway names it, and the salt of its prefixes, which the client may narrow."""

    tenant: str
    salt: str


class EngineServer:
    """An ASGI application around one engine. `model_name` is what `/v1/models` tells."""

    def __init__(
        self,
        loaded: Loaded,
        config: EngineConfig,
        model_name: str,
        thread: ThreadPoolExecutor,
        tiers: Sequence_[Tier] = (),
        reload: Callable[[], None] | None = None,
    ) -> None:
        """`reload` starts the process over with the model as it is on disk then; None where nobody would restart it."""
        self.text = loaded.text
        self.eos = loaded.eos
        self.model_name = model_name
        self.doctor = PrefixDoctor(loaded.text.decode_all)
        self.hot = HotPrefixes(loaded.text.decode_all)
        self._block, self._reload, self.boot = loaded.runner.block_size, reload, uuid.uuid4().hex
        self._outbox: list[tuple[asyncio.Queue[Arrival], Arrival]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self.engine = Engine(loaded, config, self._flush, lambda: os._exit(70), thread, tiers)
        self.vocabulary = loaded.vocabulary
        self.info = {
            "dtype": loaded.dtype,
            "context": loaded.context,
            "longest": self.engine.longest,
            "block": loaded.runner.block_size,
            "block_bytes": loaded.runner.block_bytes,
            "paged": loaded.runner.paged,
            "self_test_difference": loaded.tested.difference,
            "same_bits": not loaded.tested.gap,
            "boot": self.boot,
        }

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        route = (scope["method"], scope["path"])
        if route == ("POST", "/v1/chat/completions"):
            await self._guarded(self._chat, scope, receive, send)
        elif route == ("POST", "/v1/completions"):
            await self._guarded(self._complete, scope, receive, send)
        elif route in (("GET", "/health"), ("GET", "/admin/state")):
            state = {"status": "ok", **self.info, **dataclasses.asdict(self.engine.stats())}
            await asgi.send_json(send, 200, {**state, "tiers": self.engine.tier_stats()})
        elif route == ("GET", "/admin/doctor"):
            await asgi.send_json(send, 200, {**self.doctor.report(), "hot": self.hot.report()})
        elif route == ("POST", "/admin/kv/warm"):
            await self._guarded(self._warm, scope, receive, send)
        elif route == ("POST", "/admin/reload"):
            await self._start_over(send)
        elif route == ("POST", "/admin/kv/purge"):
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
        except EngineFull:
            await _send_error(send, 503, "the engine's queue is full")
        except EngineError as error:
            await _send_error(send, error.status, str(error))

    async def _chat(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        request = parse_chat(openai_chat.parse(await asgi.read_body(receive, BODY_LIMIT)))
        caller = self._caller(scope, request)
        with self.engine.expecting():
            prompt, grammar = await asyncio.to_thread(self._read_chat, request, caller)
        sequences = self._sequences(request, [prompt], caller, grammar)
        names = frozenset(tool["function"]["name"] for tool in request.tools)
        choices = [
            Choice(
                index,
                self.text,
                request.params.stop,
                calls=ToolCalls(self.text.tool_form(), names) if names else None,
                several_calls=request.several_calls,
            )
            for index in range(len(sequences))
        ]
        shape = ChatShape(self.text, request.params.top_logprobs is not None)
        await self._answer(Job(self.engine, request, shape, sequences, choices, self.model_name), receive, send)

    async def _complete(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        request = parse_completion(openai_chat.parse(await asgi.read_body(receive, BODY_LIMIT)))
        caller = self._caller(scope, request)
        with self.engine.expecting():
            prompts = await asyncio.to_thread(self._read_prompts, request, caller)
        sequences = self._sequences(request, prompts, caller, None)
        choices = []
        for index, sequence in enumerate(sequences):
            given = request.prompts[index // request.choices]
            repeated = given if isinstance(given, str) else self.text.decode_all(given)
            echo, silent = (repeated, sequence) if request.echo else None, not request.params.max_tokens
            choices.append(Choice(index, self.text, request.params.stop, echo=echo, silent=silent))
        shape = CompletionShape(self.text, request.params.top_logprobs is not None)
        await self._answer(Job(self.engine, request, shape, sequences, choices, self.model_name), receive, send)

    async def _answer(self, job: Job, receive: asgi.Receive, send: asgi.Send) -> None:
        for index, sequence in enumerate(job.sequences):
            self.listen(sequence, job.arrivals, index)
        async with asgi.HangupWatch(receive) as watch:
            watch.start()
            await job.answer(send)
        self.doctor.reused(job.cached)
        for sequence in job.sequences[:: job.choices_each]:
            if sequence.cached_tokens:
                last = sequence.chain[sequence.cached_tokens // self._block - 1]
                self.hot.found(last, sequence.prompt[: sequence.cached_tokens])

    async def _warm(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        """Compute the KV of a conversation's beginning in the background, and keep it."""
        body = openai_chat.parse(await asgi.read_body(receive, BODY_LIMIT))
        # Whatever follows: the beginning is what two conversations that go on differently have in common.
        turns = [{"role": "user", "content": text} for text in ("A", "9")]
        messages = body.get("messages")
        started = time.monotonic()
        if not isinstance(messages, list):
            raise BadRequest("messages must be a list", "messages")
        requests = [parse_chat({**body, "messages": [*messages, turn]}) for turn in turns]
        one, other = [
            await asyncio.to_thread(self.text.encode_chat, item.messages, item.tools, item.template_options)
            for item in requests
        ]
        common = next((index for index, pair in enumerate(zip(one, other, strict=False)) if len(set(pair)) > 1), 0)
        blocks = common // self._block
        if not blocks:
            raise BadRequest(f"messages have fewer than {self._block} tokens in common with what follows", "messages")
        caller = self._caller(scope, requests[0])
        request = dataclasses.replace(requests[0], params=SamplingParams(1, temperature=0.0), choices=1)
        (sequence,) = self._sequences(request, [one[: blocks * self._block]], caller, None)
        sequence.background = True
        arrivals: asyncio.Queue[Arrival] = asyncio.Queue()
        self.listen(sequence, arrivals, 0)
        self.engine.submit(sequence)
        _, emission = await arrivals.get()
        if emission.token is None:
            raise EngineError.of(emission)
        pinned = await asyncio.wrap_future(self.engine.pin(sequence.chain[:blocks]))
        facts = {"tokens": blocks * self._block, "cached_tokens": sequence.cached_tokens, "pinned": pinned}
        await asgi.send_json(send, 200, {**facts, "seconds": round(time.monotonic() - started, 3)})

    async def _start_over(self, send: asgi.Send) -> None:
        if self._reload is None:
            await _send_error(send, 409, "this engine was started by hand; restart it by hand")
            return
        await asgi.send_json(send, 202, {"reloading": True})
        self._reload()

    def _caller(self, scope: asgi.Scope, request: Wanted) -> Caller:
        tenant = asgi.header_map(scope).get("x-hitherto-salt", "")
        return Caller(tenant, f"{len(tenant)}:{tenant}{request.cache_salt}".removeprefix("0:"))

    def _read_chat(self, request: ChatRequest, caller: Caller) -> tuple[list[int], Callable[[], Constraint] | None]:
        """The prompt's tokens, and what makes constraints for its output."""
        prompt = self.text.encode_chat(request.messages, request.tools, request.template_options)
        self.doctor.look(prompt, caller.salt)
        schema, param = request.schema, "response_format"
        if schema is None and not request.must_call:
            return prompt, None
        grammar = json_grammar(schema) if schema is not None else ""
        if request.tools:
            param = "tools" if request.must_call else param
            schemas, otherwise = arguments_schemas(request.tools), None if request.must_call else schema
            grammar = calls_grammar(self.text.tool_form(), schemas, request.several_calls, otherwise)
        grammars = self._grammars()
        grammars.constraint(grammar, param)  # compiled here, off the event loop
        return prompt, lambda: grammars.constraint(grammar, param)

    def _read_prompts(self, request: CompletionRequest, caller: Caller) -> list[list[int]]:
        prompts = [self.text.encode(prompt) if isinstance(prompt, str) else prompt for prompt in request.prompts]
        for prompt in prompts:
            if not prompt:
                raise BadRequest("prompt must not be empty", "prompt")
            self._refuse_unknown(prompt, "prompt")  # before the doctor packs them into 32 bits
            self.doctor.look(prompt, caller.salt)
        return prompts

    def _sequences(
        self,
        request: Wanted,
        prompts: Sequence_[list[int]],
        caller: Caller,
        constraint: Callable[[], Constraint] | None,
    ) -> list[Sequence]:
        """One sequence for each choice of each prompt. Raises `BadRequest` where a prompt is not for this model."""
        longest, wanted = self.engine.longest, request.params.max_tokens
        param = "messages" if isinstance(request, ChatRequest) else "prompt"
        sequences = []
        for prompt in prompts:
            if len(prompt) + max(wanted, 1) > longest:
                raise BadRequest(
                    f"this model's maximum context length is {longest} tokens; the prompt has {len(prompt)} and "
                    f"max_tokens is {wanted or 'not set'}",
                    param if len(prompt) >= longest else "max_tokens",
                    "context_length_exceeded",
                )
            self._refuse_unknown(prompt, param)
            limit = wanted or (longest - len(prompt) if isinstance(request, ChatRequest) else 1)
            for index in range(request.choices):
                seed = (request.params.seed or 0) + index
                sequences.append(
                    Sequence(
                        id=uuid.uuid4().hex,
                        prompt=prompt,
                        params=dataclasses.replace(request.params, max_tokens=limit, seed=seed),
                        salt=caller.salt,
                        tenant=caller.tenant,
                        eos=self.eos,
                        constraint=constraint() if constraint is not None else None,
                    )
                )
        return sequences

    def _refuse_unknown(self, prompt: Sequence_[int], param: str) -> None:
        if max(prompt) >= self.vocabulary:
            raise BadRequest(f"{param} contains a token that this model has no embedding for", param)

    @functools.cache  # noqa: B019 — one server in the process, and it costs a second that only some need
    def _grammars(self) -> Grammars:
        return Grammars(self.text.tokenizer, sorted(self.eos))

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
