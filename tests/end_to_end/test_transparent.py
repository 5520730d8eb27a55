"""`hitherto serve --upstream`: a real gateway process between real clients and a scripted, real upstream."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import orjson
import pytest

from backends.fake import FakeServer, Script
from tests.conftest import Gateway, eventually

AUTH = {"authorization": "Bearer sk-client"}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, upstream: FakeServer) -> Iterator[Gateway]:
    gateway = Gateway(tmp_path_factory.mktemp("gateway"), None, "--upstream", upstream.url)
    yield gateway
    assert gateway.stop() == 0
    assert "Traceback" not in gateway.log


@pytest.fixture
def gateway(running: Gateway, upstream: FakeServer) -> Gateway:
    upstream.app.script, upstream.app.scripts, upstream.app.seen = Script(), [], []
    return running


@pytest.fixture
def sdk(gateway: Gateway) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="sk-client", max_retries=0)


def ask(sdk: openai.OpenAI, text: str, **fields: Any) -> Any:
    return sdk.chat.completions.with_raw_response.create(
        model="m", messages=[{"role": "user", "content": text}], **fields
    )


def json_text(reply: httpx.Response) -> list[str]:
    """The content pieces of a stream."""
    chunks = [orjson.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    return [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]]


def test_the_bytes_and_the_credential_travel_untouched(gateway: Gateway, upstream: FakeServer) -> None:
    raw = b'{ "messages":[{"role":"user","content":"byte for byte \\u00e9"}],\n "model" : "m", "x_unknown": 1.50 }'
    headers = {**AUTH, "content-type": "application/json", "x-custom": "1", "x-hitherto-ttl": "5", "cookie": "a=b"}
    reply = gateway.client.post("/v1/chat/completions?api-version=7", content=raw, headers=headers)
    seen = upstream.app.seen[-1]
    assert seen.body == raw and seen.query == "api-version=7" and seen.path == "/v1/chat/completions"
    assert seen.headers["authorization"] == "Bearer sk-client" and seen.headers["x-custom"] == "1"
    assert not any(name.startswith("x-hitherto") for name in seen.headers)
    assert reply.json()["choices"][0]["message"]["content"] == "echo: byte for byte é"
    assert reply.headers["x-hitherto-backend"] == "upstream" and reply.headers["x-hitherto-model"] == "m"


def test_asking_twice_asks_the_upstream_once(sdk: openai.OpenAI, upstream: FakeServer) -> None:
    first, second = (ask(sdk, "twice?") for _ in range(2))
    assert (first.headers["x-hitherto-cache"], second.headers["x-hitherto-cache"]) == ("miss", "exact")
    assert first.parse().choices == second.parse().choices and first.parse().usage == second.parse().usage
    assert first.parse().id != second.parse().id and second.parse().created >= time.time() - 5
    assert "hit" in second.headers["cache-status"] and "fwd=miss" in first.headers["cache-status"]
    assert int(second.headers["age"]) < 5 and "age" not in first.headers
    assert len(upstream.app.seen) == 1


def test_another_gateways_controls_are_no_credentials(gateway: Gateway) -> None:
    mine = {"authorization": "Bearer sk-portkey"}
    for number in range(2):
        reply = gateway.chat("controls?", {**mine, "x-portkey-trace-id": str(number)})
        assert reply.headers["x-hitherto-cache"] == ("exact" if number else "miss")
    forced = {**mine, "x-portkey-cache-force-refresh": "true"}
    assert gateway.chat("controls?", forced).headers["x-hitherto-cache"] == "bypass"
    assert gateway.chat("controls?", {**mine, "x-portkey-api-key": "another"}).headers["x-hitherto-cache"] == "miss"


@pytest.mark.parametrize("stream", [False, True])
def test_a_very_long_answer_arrives_whole_and_is_not_kept(gateway: Gateway, upstream: FakeServer, stream: bool) -> None:
    upstream.app.script = Script(text="word " * 1_200_000)
    for _ in range(2):
        reply = gateway.chat(f"long? {stream}", AUTH, stream=stream, temperature=0)
        assert reply.headers["x-hitherto-cache"] == "miss" and reply.text.count("word") == 1_200_000
    assert '"stored":"too-long"' in gateway.log
    upstream.app.script = Script()


def test_other_credentials_find_nothing(gateway: Gateway, upstream: FakeServer) -> None:
    for key in ("sk-client", "sk-other"):
        reply = gateway.chat("whose?", {"authorization": f"Bearer {key}"})
        assert reply.headers["x-hitherto-cache"] == "miss"
        assert upstream.app.seen[-1].headers["authorization"] == f"Bearer {key}"
    assert gateway.chat("whose?").headers["x-hitherto-cache"] == "miss", "nor does nobody"
    assert "authorization" not in upstream.app.seen[-1].headers
    assert gateway.chat("whose?", {"x-api-key": "sk-client"}).headers["x-hitherto-cache"] == "miss"
    assert "sk-client" not in gateway.log and "sk-other" not in gateway.log

    def stored() -> bytes:
        return b"".join(path.read_bytes() for path in (gateway.folder / "data").glob("answers.sqlite*"))

    assert eventually(lambda: b"whose?" in stored())  # written just behind the answer
    assert b"sk-client" not in stored()


def test_a_stream_and_a_whole_answer_share_an_entry_in_both_directions(
    sdk: openai.OpenAI, upstream: FakeServer
) -> None:
    upstream.app.script = Script(text="one two three four five six seven")
    streamed = ask(sdk, "stream first", stream=True, stream_options={"include_usage": True})
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed.parse() if chunk.choices)
    whole = ask(sdk, "stream first")
    assert whole.headers["x-hitherto-cache"] == "exact"
    assert whole.parse().choices[0].message.content == text == upstream.app.script.text
    assert whole.parse().usage.prompt_tokens == 11

    ask(sdk, "whole first")
    again = ask(sdk, "whole first", stream=True, stream_options={"include_usage": True})
    assert again.headers["x-hitherto-cache"] == "exact"
    assert again.headers["content-type"].startswith("text/event-stream")
    chunks = list(again.parse())
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage.completion_tokens == 7 and len(chunks) > 3
    assert len(upstream.app.seen) == 2


def test_a_tool_call_is_replayed_as_the_sdk_expects_it(sdk: openai.OpenAI, upstream: FakeServer) -> None:
    call = {"id": "call_9", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    upstream.app.script = Script(message=message, finish="tool_calls")
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    with sdk.chat.completions.stream(
        model="m", messages=[{"role": "user", "content": "tool"}], tools=tools, stream_options={"include_usage": True}
    ) as live:
        final = live.get_final_completion()
    with sdk.chat.completions.stream(model="m", messages=[{"role": "user", "content": "tool"}], tools=tools) as replay:
        assert replay.get_final_completion().choices == final.choices
    stored = ask(sdk, "tool", tools=tools)
    assert stored.headers["x-hitherto-cache"] == "exact"
    assert stored.parse().choices[0].message.tool_calls[0].function.arguments == '{"city": "Oslo"}'
    assert len(upstream.app.seen) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "script",
    [
        Script(finish="length"),
        Script(finish="content_filter"),
        Script(text=""),
        Script(status=500),
        Script(status=429, headers=(("retry-after", "7"),)),
        Script(status=401),
        Script(raw=b'{"error": {"message": "inside a 200"}}', headers=(("content-type", "application/json"),)),
        Script(raw=b"<html>", headers=(("content-type", "text/html"),)),
        Script(message={"role": "assistant", "content": None, "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": '}}]}, finish="tool_calls"),
    ],
    ids=lambda value: f"{value.finish}-{value.status}-{value.raw!r:.8}-{value.text!r:.6}-{value.message is None}"
    if isinstance(value, Script) else str(value),
)  # fmt: skip
def test_what_is_not_a_complete_good_answer_is_never_stored(
    gateway: Gateway, upstream: FakeServer, script: Script, stream: bool
) -> None:
    upstream.app.script = script
    question = f"bad {script} {stream}"
    for _ in range(2):
        reply = gateway.chat(question, AUTH, stream=stream)
        assert reply.status_code == script.status
        assert reply.headers["x-hitherto-cache"] == "miss"
        if script.status == 429:
            assert reply.headers["retry-after"] == "7"
    assert len(upstream.app.seen) == 2


def test_a_stream_without_its_terminal_event_is_relayed_but_not_stored(gateway: Gateway, upstream: FakeServer) -> None:
    upstream.app.script = Script(text="a b c", omit_done=True)
    for _ in range(2):
        assert gateway.chat("no done", AUTH, stream=True).headers["x-hitherto-cache"] == "miss"


def test_a_stream_that_breaks_off_tells_its_client_and_is_not_stored(gateway: Gateway, upstream: FakeServer) -> None:
    upstream.app.script = Script(text="a b c d e f", cut_after=3)
    for _ in range(2):
        reply = gateway.chat("cut stream", AUTH, stream=True)
        assert "upstream_interrupted" in reply.text and "[DONE]" not in reply.text
    assert len(upstream.app.seen) == 2


def test_a_body_that_breaks_off_is_an_error_and_not_stored(gateway: Gateway, upstream: FakeServer) -> None:
    upstream.app.script = Script(text="a long answer", cut_after=20)
    for _ in range(2):
        reply = gateway.chat("cut body", AUTH)
        assert reply.status_code == 502 and reply.json()["error"]["code"] == "upstream_interrupted"
    upstream.app.script = Script()
    assert gateway.chat("cut body", AUTH).headers["x-hitherto-cache"] == "miss"


def test_chunks_are_relayed_as_they_arrive(gateway: Gateway, upstream: FakeServer) -> None:
    upstream.app.script = Script(text="a b c d e f g h", chunk_delay=0.3)
    body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "slowly"}]}
    early = 0
    with gateway.client.stream("POST", "/v1/chat/completions", json=body, headers=AUTH) as reply:
        for line in reply.iter_lines():
            early += line.startswith("data") and not upstream.app.seen[-1].finished
    assert early >= 3, "not all at the end"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_stops_the_upstream(gateway: Gateway, upstream: FakeServer, stream: bool) -> None:
    upstream.app.script = Script(text="a b c d e f g h i j k l", chunk_delay=30.0, delay=0.0 if stream else 30.0)
    body = {"model": "m", "stream": stream, "messages": [{"role": "user", "content": f"bye {stream}"}]}
    told = len(gateway.log)
    with pytest.raises(httpx.ReadTimeout):
        gateway.client.post("/v1/chat/completions", json=body, headers=AUTH, timeout=4)
    assert eventually(lambda: upstream.app.seen and upstream.app.seen[-1].gone)
    assert eventually(lambda: '"client_gone":true' in gateway.log[told:])
    assert gateway.metric("hitherto_requests_total", status="200" if stream else "499") >= 1
    upstream.app.script = Script()
    assert gateway.chat(f"bye {stream}", AUTH, stream=stream).headers["x-hitherto-cache"] == "miss"


@pytest.mark.parametrize(
    ("content", "status", "param"),
    [
        (b"{", 400, None),
        (b"[]", 400, None),
        (b'{"messages": [{"role": "user", "content": "x"}]}', 400, "model"),
        (b'{"model": "m", "messages": []}', 400, "messages"),
        (b'{"model": "m", "messages": [{"role":"user","content":"x"}], "stream": 1}', 400, "stream"),
        (b"x" * (33 << 20), 413, None),
    ],
)
def test_malformed_requests_get_openais_error_shape_and_never_reach_the_upstream(
    gateway: Gateway, upstream: FakeServer, content: bytes, status: int, param: str | None
) -> None:
    reply = gateway.client.post("/v1/chat/completions", content=content, headers=AUTH)
    assert reply.status_code == status and reply.json()["error"]["param"] == param
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"} and reply.headers["x-request-id"]
    assert upstream.app.seen == []


def test_the_sdk_raises_its_own_exceptions(sdk: openai.OpenAI, upstream: FakeServer) -> None:
    upstream.app.script = Script(status=429)
    with pytest.raises(openai.RateLimitError, match="scripted 429"):
        ask(sdk, "limited")
    upstream.app.script = Script(status=401)
    with pytest.raises(openai.AuthenticationError):
        ask(sdk, "who?")
    with pytest.raises(openai.BadRequestError, match="messages"):
        sdk.chat.completions.create(model="m", messages=[])


def test_cache_control_is_obeyed(gateway: Gateway, upstream: FakeServer) -> None:
    def cache(control: str, question: str = "control") -> tuple[int, str]:
        reply = gateway.chat(question, {**AUTH, "cache-control": control})
        return reply.status_code, reply.headers.get("x-hitherto-cache", "")

    assert cache("only-if-cached") == (504, "")
    assert upstream.app.seen == []
    assert cache("no-store") == (200, "miss")
    assert cache("only-if-cached") == (504, ""), "no-store stored nothing"
    assert cache("max-age=60") == (200, "miss")
    assert cache("only-if-cached") == (200, "exact")
    assert cache("no-cache") == (200, "bypass")
    assert cache("max-age=0")[1] in ("miss", "exact")  # within the same second both are right
    assert cache("max-age=x")[0] == 400


def test_other_paths_are_relayed_whole(gateway: Gateway, upstream: FakeServer) -> None:
    reply = gateway.client.post("/v1/audio/speech?x=%2F1", content=b"\x00\xff" * 100, headers=AUTH)
    seen = upstream.app.seen[-1]
    assert reply.json() == {"path": "/v1/audio/speech", "method": "POST", "bytes": 200}
    assert seen.query == "x=%2F1" and seen.headers["authorization"] == "Bearer sk-client"
    assert gateway.client.get("/v1/models", headers=AUTH).json()["path"] == "/v1/models"
    assert gateway.client.delete("/v1/files/abc", headers=AUTH).json()["method"] == "DELETE"
    upstream.app.script = Script(status=404)
    assert gateway.client.get("/v1/fine_tuning/jobs", headers=AUTH).status_code == 404


def test_paths_outside_the_api_are_not_relayed(gateway: Gateway, upstream: FakeServer) -> None:
    reply = gateway.client.get("/etc/passwd")
    assert reply.status_code == 404 and "error" in reply.json()
    assert upstream.app.seen == []


@pytest.mark.parametrize("path", ["/v1/../admin", "/v1/a/%2e%2e/b", "/v1/a%2f..%2fb", "/v1/..\\admin", "/v1/.%2E/x"])
def test_paths_that_climb_are_refused(gateway: Gateway, upstream: FakeServer, path: str) -> None:
    host, port = gateway.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port))
    connection.putrequest("GET", path)  # as it is: no client-side cleaning
    connection.endheaders()
    assert connection.getresponse().status == 400
    assert upstream.app.seen == []


def test_hop_by_hop_credentials_tell_tenants_apart_but_go_no_further(gateway: Gateway, upstream: FakeServer) -> None:
    for number in range(2):
        reply = gateway.chat("proxied", {**AUTH, "proxy-authorization": f"Basic {number}"})
        assert reply.headers["x-hitherto-cache"] == "miss"
        assert "proxy-authorization" not in upstream.app.seen[-1].headers


def test_a_dead_upstream_is_a_502_that_says_so(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path, None, "--upstream", "http://127.0.0.1:9/v1")
    reply = gateway.chat("anyone?", AUTH)
    assert reply.status_code == 502 and reply.json()["error"]["code"] == "upstream_unreachable"
    assert gateway.stop() == 0


def test_shutdown_drains_what_is_under_way_and_answers_survive_a_restart(tmp_path: Path, fake: FakeServer) -> None:
    gateway = Gateway(tmp_path, None, "--upstream", fake.url)
    fake.app.script = Script(text="a b c d e f", chunk_delay=0.2)
    replies: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: replies.append(gateway.chat("drain me", AUTH, stream=True)))
    thread.start()
    assert eventually(lambda: fake.app.seen)
    gateway.process.terminate()
    thread.join(20)
    assert replies and replies[0].text.rstrip().endswith("[DONE]")
    assert gateway.stop() == 0

    again = Gateway(tmp_path, None, "--upstream", fake.url)
    kept = {**AUTH, "cache-control": "only-if-cached"}
    assert eventually(lambda: again.chat("drain me", kept, stream=True).status_code == 200)
    reply = again.chat("drain me", AUTH, stream=True)
    assert reply.headers["x-hitherto-cache"] == "exact"
    assert "".join(json_text(reply)) == "a b c d e f"
    assert again.stop() == 0


def test_metrics_move_and_every_request_leaves_one_line(gateway: Gateway, upstream: FakeServer) -> None:
    before = gateway.metric("hitherto_requests_total", cache="exact")
    for _ in range(3):
        gateway.chat("metrics?", {**AUTH, "x-request-id": "req-metrics"})
    assert gateway.metric("hitherto_requests_total", cache="exact") == before + 2
    assert gateway.metric("hitherto_answer_lookups_total", tier="exact", result="hit") >= 2
    assert gateway.metric("hitherto_answer_writes_total", result="stored") >= 1
    assert gateway.metric("hitherto_answer_entries") >= 1 and gateway.metric("hitherto_answer_bytes") > 0
    assert gateway.metric("hitherto_tokens_total", kind="prompt") >= 11
    assert gateway.metric("hitherto_prefix_tokens_total", source="upstream") >= 3
    assert gateway.metric("hitherto_request_seconds_count", cache="exact") >= 2
    assert eventually(lambda: gateway.log.count('"request_id":"req-metrics"') == 3)


def test_fifty_clients_at_once_all_get_their_own_answer(gateway: Gateway, upstream: FakeServer) -> None:
    results: dict[int, str] = {}

    def one(number: int) -> None:
        reply = gateway.chat(f"client {number}", AUTH, stream=bool(number % 2))
        results[number] = reply.text

    threads = [threading.Thread(target=one, args=(number,)) for number in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(f"{number}" in results[number] for number in range(50)) and len(results) == 50
