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
from backends.protocol import BackendError
from gateway.api.auth import Tenant
from gateway.dispatch import Dispatch

log = logging.getLogger("hitherto.templates")

HEADER = "x-hitherto-template"
LOOK_SECONDS = 2.0

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
    error: str = ""


class Templates:
    """The declared templates."""

    def __init__(self, templates: Sequence[Template] = ()) -> None:
        self._by_name = {template.name: template for template in templates}
        self._by_text = {
            (template.normalise, normalised(template.system, template.normalise)): template.system
            for template in templates
            if template.normalise
        }
        self._normalisations = {template.normalise for template in templates if template.normalise}

    @property
    def warm(self) -> list[Template]:
        return [template for template in self._by_name.values() if template.warm]

    def applied(self, body: dict[str, Any], raw: bytes, headers: Mapping[str, str]) -> tuple[dict[str, Any], bytes]:
        """The request with the template that it calls, or with its own copy of one in the declared spelling.

        Raises `MalformedRequest` for a template that does not exist, or beside a system prompt of the client's own.
        """
        name = headers.get(HEADER)
        messages = body.get("messages")
        if (name is None and not self._by_text) or not isinstance(messages, list) or not messages:
            return body, raw
        first = messages[0] if isinstance(messages[0], dict) else {}
        given = first.get("content") if first.get("role") in ("system", "developer") else None
        if name is None:
            text = self._declared(given) if isinstance(given, str) else None
            if text is None or text == given:
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
        return body, orjson.dumps(body)

    def _declared(self, text: str) -> str | None:
        for how in self._normalisations:
            if (found := self._by_text.get((how, normalised(text, how)))) is not None:
                return found
        return None


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
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        if self._engines and self._templates.warm:
            self._task = asyncio.create_task(self._watch(), name="warm templates")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def warm(self, names: Sequence[str] | None = None) -> list[Warmed]:
        """Compute the templates' KV wherever it is not there yet; on all engines, or on those named."""
        results = []
        for name in names if names is not None else self._engines:
            salt = self._dispatch.salt(self._tenant)
            for template in self._templates.warm:
                try:
                    facts = await self._engines[name].warm([{"role": "system", "content": template.system}], salt)
                    done = Warmed(template.name, name, facts["tokens"], facts["cached_tokens"], facts["seconds"])
                except BackendError as error:
                    done = Warmed(template.name, name, error=str(error))
                results.append(done)
        return results

    async def _watch(self) -> None:
        boots: dict[str, str] = {}
        while True:
            for name, engine in self._engines.items():
                try:
                    state = await engine.state()
                    if state is None or boots.get(name) == state["boot"]:
                        continue
                    for done in await self.warm([name]):
                        what = done.error or f"{done.tokens} tokens in {done.seconds:g} s"
                        log.info("template %s on %s: %s", done.template, name, what)
                    boots[name] = state["boot"]
                except Exception:  # whatever it is, requests are served without warm templates too
                    log.exception("templates could not be warmed on %s", name)
            await asyncio.sleep(LOOK_SECONDS)
