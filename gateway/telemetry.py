"""OpenTelemetry, where it is configured: a span and measurements for every request, by the GenAI conventions.

Names: OpenTelemetry semantic conventions for generative AI (development status, 2025). What they have no word for is
under `hitherto.`. Without `otel:` nothing of this is loaded, and trace headers pass through as they came.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from pydantic import Field

from backends.config import HttpUrl
from backends.protocol import Duration, Secret, Section, reveal
from gateway.stores.contract import Booking

_OPERATIONS = {"openai-chat": "chat", "openai-embeddings": "embeddings"}
_SECONDS = [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92]
_TOKENS = [1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304]
"""Buckets that the conventions advise."""


class TelemetryConfig(Section):
    """`otel:`, where traces and metrics go (needs hitherto[otel])."""

    endpoint: HttpUrl
    """An OTLP collector's base URL (HTTP with protobuf), like http://127.0.0.1:4318."""
    headers: dict[str, Secret] = {}
    """Sent along, like `authorization: env:OTLP_TOKEN`."""
    service: str = "hitherto"
    """The service's name."""
    sample: float = Field(default=1.0, ge=0.0, le=1.0)
    """The share of traces that begin here; of those that callers bring, their own mark decides."""
    every: Duration = Field(default=15.0, gt=0)
    """How often metrics are sent."""


class Telemetry:
    """One process' providers. Exports happen in threads of the library's own, and their failures reach no request."""

    def __init__(self, config: TelemetryConfig) -> None:
        """Raises ImportError without the packages."""
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        headers = {name: reveal(secret) for name, secret in config.headers.items()}
        resource = Resource.create({"service.name": config.service})
        self._traces = TracerProvider(resource=resource, sampler=ParentBased(TraceIdRatioBased(config.sample)))
        exporter = OTLPSpanExporter(endpoint=f"{config.endpoint}/v1/traces", headers=headers)
        self._traces.add_span_processor(BatchSpanProcessor(exporter))
        reader = PeriodicExportingMetricReader(
            OTLPMetricExporter(endpoint=f"{config.endpoint}/v1/metrics", headers=headers), config.every * 1000
        )
        self._meters = MeterProvider([reader], resource=resource)
        self._tracer, meter = self._traces.get_tracer("hitherto"), self._meters.get_meter("hitherto")
        self._context = TraceContextTextMapPropagator()
        self._tokens = meter.create_histogram(
            "gen_ai.client.token.usage", "{token}", "Tokens used.", explicit_bucket_boundaries_advisory=_TOKENS
        )
        self._seconds = meter.create_histogram(
            "gen_ai.server.request.duration", "s", "Request to last byte.", explicit_bucket_boundaries_advisory=_SECONDS
        )
        self._first = meter.create_histogram(
            "gen_ai.server.time_to_first_token", "s", "Request to first byte.",
            explicit_bucket_boundaries_advisory=_SECONDS,
        )  # fmt: skip
        self._cost = meter.create_counter("hitherto.cost", "{USD}", "Dollars spent.")
        self._saved = meter.create_counter("hitherto.saved", "{USD}", "Dollars saved.")

    def begin(self, headers: MutableMapping[str, str], surface: str) -> Any:
        """A span under what the caller's trace headers name, which the headers name from now on."""
        from opentelemetry.trace import SpanKind, set_span_in_context

        parent = self._context.extract(headers)
        span = self._tracer.start_span(_OPERATIONS.get(surface, surface), parent, SpanKind.SERVER)
        self._context.inject(headers, set_span_in_context(span))
        return span

    def end(self, span: Any, row: Booking) -> None:
        """Say what became of a request."""
        from opentelemetry.trace import Status, StatusCode

        operation = _OPERATIONS.get(row.surface, row.surface)
        told = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": row.backend or "hitherto",
            "gen_ai.request.model": row.asked,
            "gen_ai.response.model": row.model,
        }
        cost, saved = (row.cost or 0) / 1e9, (row.saved_answer + row.saved_prefix) / 1e9
        error = {"error.type": row.reason or str(row.status)} if row.status >= 400 else {}
        span.update_name(f"{operation} {row.asked}".strip())
        span.set_attributes(
            {
                **told, **error,
                "gen_ai.usage.input_tokens": row.prompt, "gen_ai.usage.output_tokens": row.completion,
                "gen_ai.usage.cache_read.input_tokens": row.cached, "http.response.status_code": row.status,
                "hitherto.tenant": row.tenant, "hitherto.cache": row.cache, "hitherto.reason": row.reason,
                "hitherto.request_id": row.request, "hitherto.cost_usd": cost, "hitherto.saved_usd": saved,
            }
        )  # fmt: skip
        if row.status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        span.end()
        told["gen_ai.request.model"] = row.asked if row.status < 400 else "other"  # whoever asks chooses it
        told["hitherto.cache"] = row.cache
        if row.prompt or row.completion:
            self._tokens.record(row.prompt, {**told, "gen_ai.token.type": "input"})
            self._tokens.record(row.completion, {**told, "gen_ai.token.type": "output"})
        self._seconds.record(row.seconds, {**told, **error})
        if row.ttft is not None:
            self._first.record(row.ttft, told)
        if cost:
            self._cost.add(cost, {**told, "hitherto.tenant": row.tenant})
        if saved > 0:
            self._saved.add(saved, {**told, "hitherto.tenant": row.tenant})

    def close(self) -> None:
        """Send what is waiting; up to some seconds."""
        self._traces.shutdown()
        self._meters.shutdown(5_000)
