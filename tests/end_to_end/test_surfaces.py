"""What a demanding client asks of the built-in engine: JSON, schemas, tools, text completions; the SDK is the judge."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from tests.conftest import Gateway

CONFIG = """
backends:
  local: {{kind: engine, model: {model}, dtype: float32, kv: {{device: 256MiB}}}}
models:
  m: {{try: [local]}}
"""
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def function(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": f"Get the {name}.", "parameters": schema}}


TOOLS = [function("weather", city={"type": "string", "maxLength": 20}), function("time", zone={"enum": ["UTC", "CET"]})]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[Gateway]:
    gateway = Gateway(tmp_path_factory.mktemp("surfaces"), CONFIG.format(model=model_folder))
    yield gateway
    assert gateway.stop() == 0


def chat(sdk: openai.OpenAI, text: str, **fields: Any) -> Any:
    messages: Any = [{"role": "user", "content": text}]
    return sdk.chat.completions.create(
        **{"model": "m", "temperature": 0, "max_tokens": 120, "messages": messages, **fields}
    )


# JSON


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_schema_is_kept_to_whatever_the_model_would_rather_say(sdk: openai.OpenAI, temperature: float) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    reply = chat(sdk, "Tell me about the sea.", response_format=form, temperature=temperature, seed=3)
    person = json.loads(reply.choices[0].message.content)
    assert set(person) == {"name", "age"} and 0 <= person["age"] <= 99 and reply.choices[0].finish_reason == "stop"


def test_json_mode_gives_an_object(sdk: openai.OpenAI) -> None:
    reply = chat(sdk, "Give me JSON.", response_format={"type": "json_object"}, max_tokens=60)
    text = reply.choices[0].message.content
    assert text.lstrip().startswith("{")
    if reply.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


def test_two_different_schemas_at_once_each_get_their_own(sdk: openai.OpenAI, gateway: Gateway) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def ask(word: str) -> str:
        schema = {
            "type": "object",
            "properties": {"w": {"const": word}},
            "required": ["w"],
            "additionalProperties": False,
        }
        form = {"type": "json_schema", "json_schema": {"name": "w", "schema": schema}}
        return json.loads(chat(sdk, "Go.", response_format=form).choices[0].message.content)["w"]

    words = [f"word{index}" for index in range(6)]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, words)) == words


def test_several_choices_follow_the_grammar_independently(sdk: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}
    reply = chat(sdk, "Invent somebody.", response_format=form, temperature=1, seed=1, n=3)
    people = [json.loads(choice.message.content) for choice in reply.choices]
    assert all(set(person) == {"name", "age"} for person in people) and len({str(person) for person in people}) > 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strnig"}}}},
            "response_format",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "stock"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [function("f", x={"type": "strnig"})], "tool_choice": "required"}, "tools"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"extra_body": {"chat_template_kwargs": {"chat_template": "x"}}}, "chat_template_kwargs"),
        ({"extra_body": {"chat_template_kwargs": []}}, None),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(sdk: openai.OpenAI, fields: Any, param: str | None) -> None:
    if param is None:
        assert chat(sdk, "x", max_tokens=2, **fields)
        return
    with pytest.raises(openai.BadRequestError) as caught:
        chat(sdk, "x", **fields)
    assert caught.value.param == param


# Tools


def test_a_required_tool_is_called_with_arguments_of_its_schema(sdk: openai.OpenAI) -> None:
    reply = chat(sdk, "What is the weather in Paris?", tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    choice = reply.choices[0]
    assert choice.finish_reason == "tool_calls" and len(choice.message.tool_calls) == 1
    call = choice.message.tool_calls[0]
    assert call.id.startswith("call_") and call.type == "function" and call.function.name in ("weather", "time")
    assert set(json.loads(call.function.arguments)) == {"city" if call.function.name == "weather" else "zone"}
    assert choice.message.content is None


def test_a_named_tool_streams_as_the_sdk_expects(sdk: openai.OpenAI) -> None:
    choice: Any = {"type": "function", "function": {"name": "time"}}
    fields = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    with sdk.chat.completions.stream(
        model="m", temperature=0, max_tokens=100, messages=[{"role": "user", "content": "Which zone is it?"}], **fields
    ) as stream:
        final = stream.get_final_completion()
    call = final.choices[0].message.tool_calls[0]
    assert call.function.name == "time" and json.loads(call.function.arguments)["zone"] in ("UTC", "CET")
    assert final.choices[0].finish_reason == "tool_calls"
    # Stored, and served again in the other shape.
    again = chat(sdk, "Which zone is it?", max_tokens=100, **fields)
    stored = again.choices[0].message.tool_calls[0]
    assert (stored.id, stored.function.arguments) == (call.id, call.function.arguments)


def test_a_tool_call_and_its_result_go_on_as_a_conversation(sdk: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    messages: Any = [
        {"role": "user", "content": "What is the weather in Paris?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Sunny, 21 degrees."},
    ]
    reply = chat(sdk, "", messages=messages, tools=TOOLS, max_tokens=40)
    assert reply.choices[0].message.content or reply.choices[0].message.tool_calls
    messages[1]["tool_calls"][0]["function"]["arguments"] = "{not json"
    with pytest.raises(openai.BadRequestError, match=r"messages\[1\].tool_calls"):
        chat(sdk, "", messages=messages, tools=TOOLS)


def test_a_schema_beside_tools_binds_the_text_and_not_the_calls(sdk: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}}
    message = chat(sdk, "Who are you?", tools=TOOLS, response_format=form).choices[0].message
    assert message.tool_calls or set(json.loads(message.content)) == {"name", "age"}


# Text completions


def complete(sdk: openai.OpenAI, prompt: Any, **fields: Any) -> Any:
    return sdk.completions.create(**{"model": "m", "temperature": 0, "max_tokens": 8, "prompt": prompt, **fields})


def test_a_completion_continues_texts_and_token_ids(sdk: openai.OpenAI, model_folder: Path) -> None:
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(model_folder).encode("The capital of France is")
    text, tokens = complete(sdk, "The capital of France is"), complete(sdk, ids)
    assert "Paris" in text.choices[0].text and tokens.choices[0].text == text.choices[0].text
    assert (
        text.object == "text_completion" and text.usage.prompt_tokens == len(ids) and text.usage.completion_tokens == 8
    )
    both = complete(sdk, ["The capital of France is", "Two plus two is"], n=2, seed=1, temperature=1)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3] and both.usage.completion_tokens == 32


def test_a_completion_streams(sdk: openai.OpenAI) -> None:
    whole = complete(sdk, "Once upon a time")
    chunks = list(complete(sdk, "Once upon a time", stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert chunks[-1].usage.completion_tokens == 8 and chunks[-2].choices[0].finish_reason == "length"


def test_echo_gives_the_prompts_logprobs_as_the_model_has_them(sdk: openai.OpenAI, model_folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    prompt = "The quick brown fox jumps over the lazy dog. " * 40
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    ids = tokenizer.encode(prompt)
    assert complete(sdk, prompt, max_tokens=1), "now it is cached, and must be computed nevertheless"
    reply = complete(sdk, prompt, max_tokens=0, echo=True, logprobs=2)
    choice = reply.choices[0]
    assert choice.text == prompt and reply.usage.completion_tokens == 0
    assert reply.usage.prompt_tokens_details.cached_tokens == 0
    with torch.inference_mode():
        model: Any = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
        values = torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), dim=-1)
    expected = [float(values[position, token]) for position, token in enumerate(ids[1:])]
    assert choice.logprobs.token_logprobs[0] is None and "".join(choice.logprobs.tokens) == prompt
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(expected, abs=2e-3)
    assert choice.logprobs.text_offset[:3] == [0, 3, 9] and len(choice.logprobs.top_logprobs[1]) == 2
    more = complete(sdk, prompt, max_tokens=3, echo=True, logprobs=0).choices[0]
    assert more.text.startswith(prompt) and len(more.logprobs.tokens) == len(ids) + 3
    assert "".join(more.logprobs.tokens) == more.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[1], "x", [-1]]}, "prompt"),
        ({"prompt": [10**6]}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"suffix": "end"}, "suffix"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt": "word " * 9000}, "prompt"),
        ({"prompt": ["x"] * 100, "n": 5}, "prompt"),
        ({"best_of": 4}, "best_of"),
    ],
)
def test_what_is_no_completion_request_is_refused_by_name(sdk: openai.OpenAI, fields: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(sdk, **{"prompt": "x", **fields})
    assert caught.value.param == param


def test_schemas_may_refer_to_their_own_definitions(sdk: openai.OpenAI) -> None:
    point = {"type": "object", "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["x"]}
    schema = {
        "type": "object",
        "properties": {"start": {"$ref": "#/$defs/point"}},
        "required": ["start"],
        "additionalProperties": False,
        "$defs": {"point": {**point, "additionalProperties": False}},
    }
    tool = {"type": "function", "function": {"name": "move", "parameters": schema}}
    fields = {"tools": [tool, *TOOLS], "tool_choice": {"type": "function", "function": {"name": "move"}}}
    reply = chat(sdk, "Move.", parallel_tool_calls=False, **fields)
    assert 0 <= json.loads(reply.choices[0].message.tool_calls[0].function.arguments)["start"]["x"] <= 9
    form = {"type": "json_schema", "json_schema": {"name": "move", "schema": schema}}
    assert "start" in json.loads(chat(sdk, "Move.", response_format=form).choices[0].message.content)


def test_logprobs_beside_tools_lose_no_token(sdk: openai.OpenAI) -> None:
    fields = {"tools": TOOLS, "logprobs": True, "max_tokens": 30, "extra_headers": {"cache-control": "no-cache"}}
    choice = chat(sdk, "Write: 1 < 2, a <tool b, <b>bold</b>.", **fields).choices[0]
    if not choice.message.tool_calls:
        assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content
