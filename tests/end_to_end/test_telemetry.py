"""OpenTelemetry to a collector, trace context end to end, and what is and is not logged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from backends.fake import FakeServer, Script
from tests.conftest import Gateway, eventually

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CONFIG = """
cache: {{semantic: false}}
backends: {{up: {{kind: openai, url: "{url}"}}}}
models: {{m: {{try: [up]}}}}
prices: {{m: {{input: 10 USD/M, cached: 1 USD/M, output: 100 USD/M}}}}
redact: {{mask: [emails]}}
log: {{bodies: 1}}
otel: {{endpoint: "{collector}", every: 200ms, headers: {{x-collector-key: "env:COLLECTOR_TEST_KEY"}}}}
"""


@pytest.fixture(scope="module")
def collector() -> Iterator[FakeServer]:
    with FakeServer() as server:
        server.app.script = Script(raw=b"")
        yield server


@pytest.fixture(scope="module")
def gateway(upstream: FakeServer, collector: FakeServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLLECTOR_TEST_KEY", "a-secret-of-the-collector")
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        base = collector.url.removesuffix("/v1")
        server = Gateway(tmp_path_factory.mktemp("gateway"), CONFIG.format(url=upstream.url, collector=base))
    yield server
    server.stop()


def spans(collector: FakeServer) -> list[Any]:
    found = []
    for seen in list(collector.app.seen):
        if seen.path == "/v1/traces":
            told = ExportTraceServiceRequest.FromString(seen.body)
            found += [span for one in told.resource_spans for scope in one.scope_spans for span in scope.spans]
    return found


def facts(thing: Any) -> dict[str, Any]:
    values = {}
    for one in thing.attributes:
        kind = one.value.WhichOneof("value")
        values[one.key] = getattr(one.value, kind) if kind else None
    return values


def test_a_span_for_every_request_under_the_callers(
    gateway: Gateway, upstream: FakeServer, collector: FakeServer, fresh: None
) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
    gateway.chat("What is traced?", headers, temperature=0)
    sent = upstream.app.seen[-1].headers
    assert sent["traceparent"].split("-")[1] == TRACE and sent["traceparent"].split("-")[2] != PARENT
    assert sent["tracestate"] == "vendor=1"
    assert eventually(lambda: any(span.trace_id.hex() == TRACE for span in spans(collector)))
    span = next(span for span in spans(collector) if span.trace_id.hex() == TRACE)
    assert span.parent_span_id.hex() == PARENT and span.span_id.hex() == sent["traceparent"].split("-")[2]
    told = facts(span)
    assert span.name == "chat m" and told["gen_ai.operation.name"] == "chat"
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (11, 7)
    assert told["hitherto.cache"] == "miss" and told["hitherto.cost_usd"] == pytest.approx(783e-6)
    assert "What is traced" not in str(told), "no text of the request"
    assert collector.app.seen[-1].headers["x-collector-key"] == "a-secret-of-the-collector"


def test_a_caller_who_does_not_want_a_trace_gets_none(
    gateway: Gateway, upstream: FakeServer, collector: FakeServer, fresh: None
) -> None:
    other = "1" * 32
    gateway.chat("not sampled", {"traceparent": f"00-{other}-{PARENT}-00"})
    assert upstream.app.seen[-1].headers["traceparent"].startswith(f"00-{other}-")
    gateway.chat("sampled", {"traceparent": f"00-{'2' * 32}-{PARENT}-01"})
    assert eventually(lambda: any(span.trace_id.hex() == "2" * 32 for span in spans(collector)))
    assert not any(span.trace_id.hex() == other for span in spans(collector))


def test_failures_are_marked_and_measured(
    gateway: Gateway, upstream: FakeServer, collector: FakeServer, fresh: None
) -> None:
    upstream.app.script = Script(status=500)
    gateway.chat("it fails", {"traceparent": f"00-{'3' * 32}-{PARENT}-01"})
    assert eventually(lambda: any(span.trace_id.hex() == "3" * 32 for span in spans(collector)))
    span = next(span for span in spans(collector) if span.trace_id.hex() == "3" * 32)
    assert span.status.code == 2 and facts(span)["http.response.status_code"] == 500

    def names() -> set[str]:
        found = set()
        for seen in list(collector.app.seen):
            if seen.path == "/v1/metrics":
                told = ExportMetricsServiceRequest.FromString(seen.body)
                found |= {
                    metric.name
                    for one in told.resource_metrics
                    for scope in one.scope_metrics
                    for metric in scope.metrics
                }
        return found

    wanted = {"gen_ai.client.token.usage", "gen_ai.server.request.duration", "gen_ai.server.time_to_first_token",
              "hitherto.cost", "hitherto.saved"}  # fmt: skip
    assert eventually(lambda: wanted <= names()), names()


def test_bodies_are_logged_masked_where_they_are_asked_for(gateway: Gateway, fresh: None) -> None:
    gateway.chat("write to\njane.doe@example.com", {"authorization": "Bearer a-secret-key"}, temperature=0)
    assert eventually(lambda: "write to" in gateway.log)
    lines = [json.loads(line) for line in gateway.log.splitlines() if line.startswith("{")]
    bodies = [line for line in lines if "write to" in line.get("request", "")]
    assert bodies and "jane.doe" not in gateway.log and "echo" in bodies[0]["response"]
    assert "a-secret-key" not in gateway.log and "a-secret-of-the-collector" not in gateway.log


def test_without_telemetry_trace_headers_pass_through_and_no_body_is_logged(
    upstream: FakeServer, fresh: None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    config = f"cache: {{semantic: false}}\nbackends: {{up: {{kind: openai, url: '{upstream.url}'}}}}\n"
    server = Gateway(tmp_path_factory.mktemp("plain"), config + "models: {m: {try: [up]}}\n")
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "a=b", "baggage": "x=y", "x-request-id": "mine"}
    reply = server.chat("a private matter", headers)
    assert {name: upstream.app.seen[-1].headers[name] for name in headers} == headers
    assert reply.headers["x-request-id"] == "mine"
    server.stop()
    assert "a private matter" not in server.log and '"request_id":"mine"' in server.log
