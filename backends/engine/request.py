"""From the bodies of chat and text completions to sampling parameters, with clear words for what is refused."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass, field, replace
from typing import Any

from backends.engine.sequence import SamplingParams

MAX_STOPS = 16
MAX_CHOICES = 16
MAX_TOP_LOGPROBS = 20
MAX_SEQUENCES = 256
RESERVED_OPTIONS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "messages",
        "tools",
    }
    | {"padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenize", "tokenizer_kwargs"}
    | {"return_assistant_tokens_mask"}
)


class BadRequest(ValueError):
    """The request cannot be served; `param` names the field, in OpenAI's error shape."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = param, code


@dataclass(frozen=True, slots=True)
class Wanted:
    """What every request for output says, once checked. `params.max_tokens` is 0 where the client set no limit."""

    model: str
    params: SamplingParams
    stream: bool
    include_usage: bool
    cache_salt: str
    choices: int


@dataclass(frozen=True, slots=True)
class ChatRequest(Wanted):
    """A chat completion. `schema`: what the text must be, as a JSON schema; None: any text."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    must_call: bool = False
    several_calls: bool = True
    schema: dict[str, Any] | None = None
    template_options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CompletionRequest(Wanted):
    """A text completion. Prompts are texts or token ids; `echo` repeats them in front of what is written."""

    prompts: list[str | list[int]]
    echo: bool = False


def parse_chat(body: dict[str, Any]) -> ChatRequest:
    """Check every field we act on. Raises `BadRequest`."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise BadRequest("messages must be a list of at least one message object", "messages")
    if body.get("functions") or body.get("function_call"):
        raise BadRequest("functions are not served; use tools", "functions")
    logprobs = _boolean(body, "logprobs")
    top = _number(body, "top_logprobs", 0, 0, MAX_TOP_LOGPROBS, whole=True)
    if top and not logprobs:
        raise BadRequest("top_logprobs needs logprobs: true", "top_logprobs")
    limit_field = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    limit = int(_number(body, limit_field, 0, 1, 1 << 31, whole=True))
    tools, must_call = _tools(body)
    options = body.get("chat_template_kwargs") or {}
    if not isinstance(options, dict) or (strange := RESERVED_OPTIONS & set(options)):
        raise BadRequest(
            "chat_template_kwargs must be an object of the chat template's own variables"
            + (f"; not {', '.join(sorted(strange))}" if isinstance(options, dict) else ""),
            "chat_template_kwargs",
        )
    return ChatRequest(
        **_wanted(body, _sampling(body, limit, int(top) if logprobs else None)),
        messages=messages,
        tools=tools,
        must_call=must_call,
        several_calls=body.get("parallel_tool_calls") is not False,
        schema=_schema(body.get("response_format")),
        template_options=options,
    )


def parse_completion(body: dict[str, Any]) -> CompletionRequest:
    """Check every field we act on. Raises `BadRequest`."""
    if body.get("suffix"):
        raise BadRequest("suffix: the built-in engine only continues a text", "suffix")
    prompts = _prompts(body.get("prompt"))
    logprobs = body.get("logprobs")
    top = int(_number(body, "logprobs", 0, 0, MAX_TOP_LOGPROBS, whole=True)) if logprobs is not None else None
    limit, echo = int(_number(body, "max_tokens", 16, 0, 1 << 31, whole=True)), _boolean(body, "echo")
    if not limit and not echo:
        raise BadRequest("max_tokens: 0 needs echo: true", "max_tokens")
    params = _sampling(body, limit, top)
    wanted = _wanted(body, replace(params, prompt_logprobs=top if echo else None))
    if len(prompts) * wanted["choices"] > MAX_SEQUENCES:
        raise BadRequest(f"prompts times n may be {MAX_SEQUENCES} at most", "prompt")
    if body.get("best_of") not in (None, wanted["choices"]):
        raise BadRequest("best_of must be n", "best_of")
    return CompletionRequest(**wanted, prompts=prompts, echo=echo)


def _prompts(value: Any) -> list[str | list[int]]:
    def ids(item: Any) -> bool:
        return isinstance(item, list) and bool(item) and all(type(token) is int and token >= 0 for token in item)

    prompts = [value] if isinstance(value, str) or ids(value) else value
    if not isinstance(prompts, list) or not prompts or not all(isinstance(p, str) or ids(p) for p in prompts):
        raise BadRequest("prompt must be a string, a list of token ids, or a list of either", "prompt")
    return prompts


def _wanted(body: dict[str, Any], params: SamplingParams) -> dict[str, Any]:
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise BadRequest("stream_options must be an object", "stream_options")
    for name in ("cache_salt", "model"):
        if not isinstance(body.get(name) or "", str):
            raise BadRequest(f"{name} must be a string", name)
    return {
        "model": body.get("model") or "",
        "params": params,
        "stream": _boolean(body, "stream"),
        "include_usage": bool(options.get("include_usage")),
        "cache_salt": body.get("cache_salt") or "",
        "choices": int(_number(body, "n", 1, 1, MAX_CHOICES, whole=True)),
    }


def _tools(body: dict[str, Any]) -> tuple[list[dict[str, Any]], bool]:
    """The tools that may be called, and whether one must be."""
    tools = body.get("tools") or []
    choice = body.get("tool_choice") or ("auto" if tools else "none")
    for index, tool in enumerate(tools if isinstance(tools, list) else [None]):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise BadRequest(f"tools[{index}] must be a function with a name", "tools")
        if not isinstance(function.get("parameters") or {}, dict):
            raise BadRequest(f"tools[{index}].function.parameters must be a JSON schema", "tools")
    if choice == "none":
        return [], False
    if choice in ("auto", "required"):
        if choice == "required" and not tools:
            raise BadRequest("tool_choice: required needs tools", "tool_choice")
        return tools, choice == "required"
    named = choice.get("function") if isinstance(choice, dict) else None
    name = named.get("name") if isinstance(named, dict) else None
    chosen = [tool for tool in tools if tool["function"]["name"] == name]
    if not chosen:
        raise BadRequest("tool_choice must be none, auto, required, or name one of tools", "tool_choice")
    return chosen, True


def _schema(form: Any) -> dict[str, Any] | None:
    """The JSON schema that `response_format` stands for."""
    if form is None or form == {"type": "text"}:
        return None
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "json_object":
        return {"type": "object"}
    if kind == "json_schema":
        described = form.get("json_schema")
        schema = described.get("schema") if isinstance(described, dict) else None
        if isinstance(schema, dict):
            return schema
        raise BadRequest("response_format.json_schema.schema must be a JSON schema", "response_format")
    raise BadRequest("response_format must be of type text, json_object or json_schema", "response_format")


def _sampling(body: dict[str, Any], max_tokens: int, top_logprobs: int | None) -> SamplingParams:
    seed = body.get("seed")
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
        raise BadRequest("seed must be an integer", "seed")
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=_number(body, "temperature", 1.0, 0.0, 2.0),
        top_p=_number(body, "top_p", 1.0, 0.0, 1.0),
        top_k=max(0, int(_number(body, "top_k", 0, -1, 1 << 31, whole=True))),
        min_p=_number(body, "min_p", 0.0, 0.0, 1.0),
        presence_penalty=_number(body, "presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=_number(body, "frequency_penalty", 0.0, -2.0, 2.0),
        logit_bias=_logit_bias(body.get("logit_bias")),
        seed=seed if seed is not None else secrets.randbits(63),
        stop=_stops(body.get("stop")),
        top_logprobs=top_logprobs,
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
