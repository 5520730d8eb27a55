"""System prompts that an operator declares: called by name, put into one spelling, and kept warm on the engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from backends.dialects.openai_chat import MalformedRequest
from backends.engine.backend import EngineBackend
from backends.protocol import BackendError, BackendRefused
from gateway.api.auth import Tenant
from gateway.dispatch import Dispatch

log = logging.getLogger("hitherto.templates")

HEADER = "x-hitherto-template"
LOOK_SECONDS, RETRY_SECONDS = 2.0, 15.0

Normalisation = Literal["trim", "newlines"]


@dataclass(frozen=True, slots=True)
class Template:
    """A declared system prompt. `normalise` says which differences in a client's copy of it do not matter."""

    name: str
    system: str
    warm: bool = True
    normalise: tuple[Normalisation, ...] = ()


@dataclass(frozen=True, slots=True)
class Warmed:
    """What warming one template on one engine did; `error` is empty if it went well."""

    template: str
    backend: str
    tokens: int = 0
    cached_tokens: int = 0
    seconds: float = 0.0
    pinned: bool = False
    """It gives way last; False when templates have half of the memory already."""
    error: str = ""
    again: bool = False
    """It may work another time."""


class Templates:
    """The declared templates."""

    def __init__(self, templates: Sequence[Template] = ()) -> None:
        self._by_name = {template.name: template for template in templates}
        self._spellings: dict[tuple[Normalisation, ...], dict[str, str]] = {}
        """By what does not matter in them: texts without that, and as they were declared; the first one wins."""
        for template in templates:
            if template.normalise:
                known = self._spellings.setdefault(template.normalise, {})
                known.setdefault(normalised(template.system, template.normalise), template.system)
        self._exact = {template.system for template in templates}

    @property
    def warm(self) -> list[Template]:
        return [template for template in self._by_name.values() if template.warm]

    def applied(self, body: dict[str, Any], raw: bytes, headers: Mapping[str, str]) -> tuple[dict[str, Any], bytes]:
        """The request with the template that it calls, or with its own copy of one in the declared spelling.

        Raises `MalformedRequest` for a template that does not exist, or beside a system prompt of the client's own.
        """
        name = headers.get(HEADER)
        messages = body.get("messages")
        if (name is None and not self._spellings) or not isinstance(messages, list) or not messages:
            return body, raw
        first = messages[0] if isinstance(messages[0], dict) else {}
        given = first.get("content") if first.get("role") in ("system", "developer") else None
        if name is None:
            text = self._declared(given) if isinstance(given, str) else None
            if text is None:
                return body, raw
            changed = [{**first, "content": text}, *messages[1:]]
        else:
            template = self._by_name.get(name)
            if template is None:
                known = ", ".join(sorted(self._by_name)) or "none"
                raise MalformedRequest(f"{HEADER}: there is no template {name!r} (known: {known})", HEADER)
            if given is not None:
                raise MalformedRequest(f"{HEADER}: the messages have a system prompt of their own", HEADER)
            changed = [{"role": "system", "content": template.system}, *messages]
        body = {**body, "messages": changed}
        try:
            return body, orjson.dumps(body)
        except TypeError as error:  # orjson reads deeper nesting than it writes
            raise MalformedRequest("the body is nested too deeply") from error

    def _declared(self, text: str) -> str | None:
        """The template that a text is another spelling of."""
        if text in self._exact:
            return None
        found = (known.get(normalised(text, how)) for how, known in self._spellings.items())
        return next((system for system in found if system is not None), None)


def normalised(text: str, how: Sequence[Normalisation]) -> str:
    """`newlines`: one kind of line end; `trim`: no blanks at line ends, nor around the text."""
    if "newlines" in how:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    if "trim" in how:
        text = "\n".join(line.rstrip(" \t") for line in text.split("\n")).strip()
    return text


class Warmer:
    """Keeps the templates warm on every engine: at the start, and after an engine was started again."""

    def __init__(self, templates: Templates, dispatch: Dispatch, tenant: Tenant) -> None:
        self._templates, self._dispatch, self._tenant = templates, dispatch, tenant
        self._engines = {
            name: backend for name, backend in dispatch.backends.items() if isinstance(backend, EngineBackend)
        }
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        if self._templates.warm:
            self._tasks = [
                asyncio.create_task(self._watch(name), name=f"warm templates on {name}") for name in self._engines
            ]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def warm(self) -> list[Warmed]:
        """Compute the templates' KV wherever it is not there yet."""
        lists = await asyncio.gather(*(self._warm(name) for name in self._engines))
        return [done for items in lists for done in items]

    async def _warm(self, name: str) -> list[Warmed]:
        engine, salt, results = self._engines[name], self._dispatch.salt(self._tenant), []
        for template in self._templates.warm:
            try:
                facts = await engine.warm([{"role": "system", "content": template.system}], salt)
            except BackendError as error:
                again = not isinstance(error, BackendRefused)
                results.append(Warmed(template.name, name, error=str(error), again=again))
            else:
                numbers = facts["tokens"], facts["cached_tokens"], facts["seconds"], facts["pinned"]
                results.append(Warmed(template.name, name, *numbers))
        return results

    async def _watch(self, name: str) -> None:
        """Warm the templates whenever the engine has started, and again later what did not work."""
        boot, engine = "", self._engines[name]
        while True:
            pause = LOOK_SECONDS
            state = await engine.state()
            if state is not None and state["boot"] != boot:
                results = await self._warm(name)
                for done in results:
                    log.info("template %s on %s: %s", done.template, name, done.error or f"{done.tokens} tokens")
                if any(done.again for done in results):
                    pause = RETRY_SECONDS
                else:
                    boot = state["boot"]
            await asyncio.sleep(pause)
