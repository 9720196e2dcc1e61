"""Spans of finished requests, sent as OTLP over HTTP. Imported only if traces are configured.

A request has one span, by OpenTelemetry's conventions for generative AI, and a child span for each of its phases.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)
from opentelemetry.util.types import AttributeValue

import protocol
from gateway.request.record import RequestRecord, TraceContext
from gateway.telemetry.metrics import PROVIDER, operation_of

log = logging.getLogger(__name__)

TRACES_PATH: Final = "/v1/traces"
EXPORT_TIMEOUT_S: Final = 5.0
# If a collector does not answer, export pauses for this long. Spans that end during the pause are lost.
PAUSE_S: Final = 60.0


class OtelTracer:
    """Tracer that makes spans of ended requests; OpenTelemetry's thread sends the spans."""

    def __init__(self, endpoint: str) -> None:
        """If `endpoint` has no path, the path for traces is added. OTEL_EXPORTER_OTLP_HEADERS may add headers."""
        url = endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + TRACES_PATH
        exporter = PatientExporter(OTLPSpanExporter(url, timeout=EXPORT_TIMEOUT_S), url)
        resource = Resource.create({"service.name": "mlxd", "service.version": protocol.__version__})
        self._provider = TracerProvider(sampler=ParentBased(ALWAYS_ON), resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("mlxd", protocol.__version__)

    def export(self, record: RequestRecord) -> str:
        """Queue the spans of an ended request, and return the trace's id."""
        now_ns = time.time_ns()
        began_ns = now_ns - round((record.clock() - record.started) * 1e9)
        name = f"{_operation(record)} {record.model}"
        span = self._tracer.start_span(
            name, _parent(record.trace), SpanKind.SERVER, _attributes(record), start_time=began_ns
        )
        if record.outcome:
            span.set_attribute("error.type", record.outcome)
            span.set_status(Status(StatusCode.ERROR, record.outcome))
        inside = set_span_in_context(span)
        for phase, start_s, length_s in record.phases.spans():
            start_ns = began_ns + round(start_s * 1e9)
            child = self._tracer.start_span(phase, inside, start_time=start_ns)
            child.end(start_ns + round(length_s * 1e9))
        span.end(now_ns)
        return f"{span.get_span_context().trace_id:032x}"

    def close(self) -> None:
        """Send queued spans, which takes at most a few seconds."""
        self._provider.shutdown()


class PatientExporter(SpanExporter):
    """Exporter that pauses after a failure and logs the failure once. Only the exporting thread uses it."""

    def __init__(self, inner: SpanExporter, url: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._inner = inner
        self._url = url
        self._clock = clock
        self._resume_at = float("-inf")
        self._is_failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export spans. Never raises; failed spans are lost."""
        if self._clock() < self._resume_at:
            return SpanExportResult.FAILURE
        result = self._inner.export(spans)
        is_failing = result is not SpanExportResult.SUCCESS
        if is_failing:
            self._resume_at = self._clock() + PAUSE_S
        if is_failing and not self._is_failing:
            log.warning("traces cannot be exported to %s; new ones are dropped", self._url)
        elif self._is_failing and not is_failing:
            log.info("traces are exported again to %s", self._url)
        self._is_failing = is_failing
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()


def _operation(record: RequestRecord) -> str:
    """Return the operation's name in OpenTelemetry's conventions."""
    return operation_of(record.path) or "chat"


def _attributes(record: RequestRecord) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": _operation(record),
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": record.model or "",
        "gen_ai.response.model": record.model or "",
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
        "http.request.method": record.method,
        "http.response.status_code": record.status,
        "url.path": record.path,
        "mlxd.request.id": record.id,
        "mlxd.request.stream": record.stream,
    }
    if record.finishes:
        attributes["gen_ai.response.finish_reasons"] = record.finishes
    if record.caller.key is not None:
        attributes["mlxd.key"] = record.caller.key
    if record.first_token_s is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = record.first_token_s
    return attributes


def _parent(context: TraceContext | None) -> Context:
    if context is None:
        return Context()
    flags = TraceFlags(TraceFlags.SAMPLED if context.is_sampled else TraceFlags.DEFAULT)
    state = TraceState.from_header([context.state]) if context.state else TraceState()
    remote = SpanContext(context.trace_id, context.span_id, is_remote=True, trace_flags=flags, trace_state=state)
    return set_span_in_context(NonRecordingSpan(remote), Context())
