"""Which requests share an answer.

`scope` covers everything that must be equal, `key` the scope and the question's exact text. Every field of the
request is in the scope unless it stands on the list below with its reason, so a field that nobody has heard of yet
makes requests different, never wrongly equal.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import orjson

from backends.protocol import View

if TYPE_CHECKING:
    from gateway.cache.question import Question

IGNORED: Mapping[str, str] = {
    "stream": "decides how the answer is sent; one entry serves both ways",
    "stream_options": "decides how the answer is sent; usage is rendered per request",
    "user": "identifies the end user to the provider's abuse monitoring; the answer does not depend on it",
    "safety_identifier": "as user",
    "metadata": "labels for the provider's dashboard",
    "store": "whether the provider keeps a copy",
    "prompt_cache_key": "routes to a warm prefix cache; the answer does not depend on it",
    "prompt_cache_retention": "how long the provider keeps a prefix",
    "prompt_cache_options": "as prompt_cache_retention",
    "cache_salt": "isolates prefix KV; the tenant already isolates answers",
}
"""Request fields that do not change the answer, each with its reason."""

DEFAULTS: Mapping[str, Any] = {
    "n": 1,
    "logprobs": False,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "stop": None,
    "logit_bias": None,
    "seed": None,
    "tools": None,
    "tool_choice": None,
    "response_format": None,
    "max_tokens": None,
    "max_completion_tokens": None,
    "temperature": None,
    "top_p": None,
    "top_logprobs": None,
    "functions": None,
    "function_call": None,
    "reasoning_effort": None,
    "modalities": None,
    "audio": None,
    "prediction": None,
    "verbosity": None,
    "web_search_options": None,
}
"""Fields whose absence means the same as this value with every backend. Not temperature: 1: some servers take another
default from the model's files."""

_NEUTRAL = re.compile(
    r"user-agent|accept(-.*)?|content-type|content-length|host|connection|keep-alive|te|transfer-encoding|expect|origin"
    r"|referer|dnt|priority|pragma|cache-control|sec-.*|forwarded|x-real-ip|via|true-client-ip"
    r"|x-forwarded-(for|host|proto|protocol|port|prefix|server|scheme|ssl|path|uri)"
    r"|cf-(ray|connecting-ip|connecting-ipv6|ipcountry|visitor|worker|ew-via|warp-tag-id)|cdn-loop|upgrade-insecure-requests|x-stainless-.*|idempotency-key|x-hitherto-.*|x-portkey-(cache-.*|metadata)"
    r"|traceparent|tracestate|baggage|sentry-trace|x-b3-.*|b3|x-datadog-.*|.*(request|trace|correlation|span)-?id"
)
"""Request headers that say nothing about the answer: the connection, the client's make, the path it came, tracing."""


def telling_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers that may change the answer: all but the neutral ones."""
    return {name: value for name, value in headers.items() if not _is_neutral(name)}


@lru_cache(maxsize=1024)  # the same few names come with every request
def _is_neutral(name: str) -> bool:
    return _NEUTRAL.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class Scope:
    """Everything that must be equal for two requests to share an answer when their questions agree.

    `target` identifies what computes the answer: backend, its identity, model there. `headers` are those that would
    be passed on to it, without credentials (which are the tenant).
    """

    view: View
    tenant: str
    target: tuple[str, ...]
    headers: Mapping[str, str]
    query: str
    namespace: str
    user: str = ""
    """The end user, where answers are kept apart by that."""

    def digest(self) -> bytes:
        """32 bytes that are equal exactly if two scopes are. Raises TypeError for fields that are nested too deeply."""
        chosen, fields = _canonical(telling_headers(self.headers)), _canonical(self._fields())
        return _digest(
            "scope/3",
            self.tenant,
            self.user,
            self.view.surface,
            self.namespace,
            self.query,
            *self.target,
            chosen,
            fields,
        )

    def parts(self) -> dict[str, str]:
        """The name of each part with a hash of its value, so that two scopes can be compared without their content."""
        values: dict[str, Any] = {
            "tenant": self.tenant,
            "user": self.user,
            "surface": self.view.surface,
            "namespace": self.namespace,
            "query": self.query,
            "backend": self.target[0] if self.target else "",
            "backend identity": list(self.target[1:2]),
            "model at the backend": list(self.target[2:]),
            **{f"header {name}": value for name, value in telling_headers(self.headers).items()},
        }
        for name, value in self._fields().items():
            if name == "messages" and isinstance(value, list):
                values |= {f"messages[{number}]": message for number, message in enumerate(value)}
            else:
                values[name] = value
        return {name: _digest("part", _canonical(value)).hex()[:16] for name, value in values.items()}

    def _fields(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in self.view.scope_fields.items()
            if name not in IGNORED and not (name in DEFAULTS and _is_default(value, DEFAULTS[name]))
        }


def group_digest(question: Question) -> bytes:
    """16 bytes that are equal for questions to the same model under the same system prompt: a class of scopes."""
    fields = question.view.scope_fields
    messages = fields.get("messages")
    system = [
        message.get("content")
        for message in (messages if isinstance(messages, list) else [])
        if isinstance(message, dict) and message.get("role") in ("system", "developer")
    ]
    return _digest("group", question.view.model, _canonical(system))[:16]


def key_digest(scope: bytes, question: str | None, variant: int = 0) -> bytes:
    """32 bytes that are equal exactly if two requests have the same scope, question, and number of the answer."""
    kind = "none" if question is None else "text"
    return _digest("key/1", scope, kind, question or "", *([str(variant)] if variant else []))


def _is_default(value: Any, default: Any) -> bool:
    return value is None or (value == default and isinstance(value, bool) == isinstance(default, bool))


def _canonical(value: Any) -> bytes:
    """One spelling for equal JSON values: keys sorted, no spaces, 1.0 as 1."""
    return orjson.dumps(_same_numbers(value), option=orjson.OPT_SORT_KEYS)


def _same_numbers(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value) if abs(value) < 2**53 else value
    if isinstance(value, dict):
        return {name: _same_numbers(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_same_numbers(item) for item in value]
    return value


def _digest(*parts: str | bytes) -> bytes:
    """blake2b over length-framed parts, so that no two lists of parts can read the same."""
    digest = hashlib.blake2b(digest_size=32)
    for part in parts:
        data = part if isinstance(part, bytes) else part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()
