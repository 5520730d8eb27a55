"""From the body of `POST /v1/chat/completions` to sampling parameters, with clear words for what is refused."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from typing import Any

from backends.engine.sequence import SamplingParams

MAX_STOPS = 16
MAX_CHOICES = 16
MAX_TOP_LOGPROBS = 20


class BadRequest(ValueError):
    """The request cannot be served; `param` names the field, in OpenAI's error shape."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = param, code


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A checked request. `params.max_tokens` is 0 where the client set no limit."""

    model: str
    messages: list[dict[str, Any]]
    params: SamplingParams
    stream: bool
    include_usage: bool
    cache_salt: str
    choices: int


def parse_chat(body: dict[str, Any]) -> ChatRequest:
    """Check every field we act on. Raises `BadRequest`."""
    _refuse_unsupported(body)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise BadRequest("messages must be a list of at least one message object", "messages")
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise BadRequest("stream_options must be an object", "stream_options")
    salt = body.get("cache_salt") or ""
    if not isinstance(salt, str):
        raise BadRequest("cache_salt must be a string", "cache_salt")
    model = body.get("model") or ""
    if not isinstance(model, str):
        raise BadRequest("model must be a string", "model")
    return ChatRequest(
        model=model,
        messages=messages,
        params=_sampling(body),
        stream=_boolean(body, "stream"),
        include_usage=bool(options.get("include_usage")),
        cache_salt=salt,
        choices=int(_number(body, "n", 1, 1, MAX_CHOICES, whole=True)),
    )


def _refuse_unsupported(body: dict[str, Any]) -> None:
    if body.get("tools") or body.get("functions"):
        raise BadRequest("tools: the built-in engine does not call tools", "tools")
    form = body.get("response_format")
    if form and (not isinstance(form, dict) or form.get("type") != "text"):
        raise BadRequest("response_format: the built-in engine answers in plain text only", "response_format")


def _sampling(body: dict[str, Any]) -> SamplingParams:
    limit_field = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    logprobs = _boolean(body, "logprobs")
    top = _number(body, "top_logprobs", 0, 0, MAX_TOP_LOGPROBS, whole=True)
    if top and not logprobs:
        raise BadRequest("top_logprobs needs logprobs: true", "top_logprobs")
    seed = body.get("seed")
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
        raise BadRequest("seed must be an integer", "seed")
    return SamplingParams(
        max_tokens=int(_number(body, limit_field, 0, 1, 1 << 31, whole=True)),
        temperature=_number(body, "temperature", 1.0, 0.0, 2.0),
        top_p=_number(body, "top_p", 1.0, 0.0, 1.0),
        top_k=max(0, int(_number(body, "top_k", 0, -1, 1 << 31, whole=True))),
        min_p=_number(body, "min_p", 0.0, 0.0, 1.0),
        presence_penalty=_number(body, "presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=_number(body, "frequency_penalty", 0.0, -2.0, 2.0),
        logit_bias=_logit_bias(body.get("logit_bias")),
        seed=seed if seed is not None else secrets.randbits(63),
        stop=_stops(body.get("stop")),
        top_logprobs=int(top) if logprobs else None,
        ignore_eos=_boolean(body, "ignore_eos"),
    )


def _boolean(body: dict[str, Any], field: str) -> bool:
    value = body.get(field)
    if value is not None and not isinstance(value, bool):
        raise BadRequest(f"{field} must be true or false", field)
    return bool(value)


def _number(body: dict[str, Any], field: str, default: float, low: float, high: float, whole: bool = False) -> float:
    value = body.get(field)
    if value is None:
        return default
    kind = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kind) or not math.isfinite(value):
        raise BadRequest(f"{field} must be {'an integer' if whole else 'a number'}", field)
    if not low <= value <= high:
        raise BadRequest(f"{field} must be between {low:g} and {high:g}, not {value:g}", field)
    return value


def _stops(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise BadRequest("stop must be a string or a list of strings that are not empty", "stop")
    if len(stops) > MAX_STOPS:
        raise BadRequest(f"stop may hold at most {MAX_STOPS} strings", "stop")
    return tuple(stops)


def _logit_bias(value: Any) -> dict[int, float]:
    if not value:
        return {}
    try:
        bias = {int(token): float(amount) for token, amount in value.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise BadRequest("logit_bias must map token ids to numbers", "logit_bias") from error
    if not all(-100 <= amount <= 100 for amount in bias.values()):
        raise BadRequest("logit_bias values must be between -100 and 100", "logit_bias")
    return bias
