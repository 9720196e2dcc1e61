import io
import json
import subprocess
import sys
import threading
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from gateway.config.load import invalid_endpoint_reason
from gateway.config.settings import ServerConfig
from gateway.middleware.otel import PAUSE_S, PatientExporter
from gateway.request.record import read_context
from gateway.telemetry.logs import LogSinks
from tests.gateway.harness import chat, running

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


class Collector(ThreadingHTTPServer):
    """An OTLP receiver: what was posted, by path."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Receive)
        self.posted: list[tuple[str, ExportTraceServiceRequest]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def spans(self) -> list[Span]:
        return [
            span
            for _, request in self.posted
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def tree(self) -> tuple[Span, dict[str, Span]]:
        """The only request there is, and its phases by name."""
        spans = self.spans()
        [root] = [span for span in spans if span.kind == Span.SPAN_KIND_SERVER]
        return root, {span.name: span for span in spans if span.parent_span_id == root.span_id}


class _Receive(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.posted.append((self.path, ExportTraceServiceRequest.FromString(body)))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def collector() -> Generator[Collector, None, None]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def attributes(span: Span) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pair in span.attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind or "")
        found[pair.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return found


async def ask(home: Path, server: ServerConfig, *, status: int = 200, headers: dict[str, str] | None = None) -> str:
    """One request with its prompt and usage given; returns the log."""
    stream = io.StringIO()
    said = json.dumps([["progress"], ["wait"], ["text", "a"], ["text", "b"], ["finish", "stop"]])
    body = chat(said) if status == 200 else chat("refused", model="m")
    path = "/v1/chat/completions"
    if status != 200:
        path, body = "/v1/completions", {"model": "m", "prompt": "refused"}
    with LogSinks("info", json=True, stream=stream):
        async with running(home, server=server, worker="talkative") as gateway:
            answer = await gateway.client.post(path, json=body, headers={"x-request-id": "mine"} | (headers or {}))
            assert answer.status_code == status
    return stream.getvalue()


def access_line(log: str) -> dict[str, Any]:
    [line] = [line for line in map(json.loads, log.splitlines()) if line["logger"] == "gateway.middleware.access_log"]
    return line


@pytest.mark.anyio
async def test_a_request_is_a_span_with_its_phases_below_it(tmp_path: Path, collector: Collector) -> None:
    log = await ask(tmp_path, ServerConfig(otlp_endpoint=collector.url))
    root, phases = collector.tree()

    assert {path for path, _ in collector.posted} == {"/v1/traces"}
    assert root.name == "chat m"
    found = attributes(root)
    assert found["gen_ai.operation.name"] == "chat"
    assert found["gen_ai.request.model"] == "m"
    assert (found["gen_ai.usage.input_tokens"], found["gen_ai.usage.output_tokens"]) == (3, 4)
    assert found["gen_ai.usage.cache_read.input_tokens"] == 1
    assert found["gen_ai.response.finish_reasons"] == ["stop"]
    assert (found["http.response.status_code"], found["mlxd.request.id"]) == (200, "mine")
    assert set(phases) == {"load", "queue", "prefill", "decode"}
    assert root.start_time_unix_nano <= phases["load"].start_time_unix_nano
    assert phases["load"].end_time_unix_nano <= phases["queue"].start_time_unix_nano
    # As long as the worker says, one after the other.
    for name, length_ms in (("queue", 1), ("prefill", 2), ("decode", 3)):
        assert phases[name].end_time_unix_nano - phases[name].start_time_unix_nano == length_ms * 1_000_000
    assert phases["prefill"].end_time_unix_nano == phases["decode"].start_time_unix_nano
    assert access_line(log)["trace"] == root.trace_id.hex()
    assert "text" not in str(found)


@pytest.mark.anyio
async def test_a_clients_trace_goes_on_with_its_state(tmp_path: Path, collector: Collector) -> None:
    headers = {"traceparent": PARENT, "tracestate": "vendor=1"}
    log = await ask(tmp_path, ServerConfig(otlp_endpoint=collector.url), headers=headers)
    root, _ = collector.tree()

    assert (root.trace_id.hex(), root.parent_span_id.hex(), root.trace_state) == (TRACE, PARENT[36:52], "vendor=1")
    assert access_line(log)["trace"] == TRACE


@pytest.mark.anyio
async def test_what_the_client_does_not_sample_is_not_sent_and_still_named_in_the_log(
    tmp_path: Path, collector: Collector
) -> None:
    headers = {"traceparent": f"{PARENT[:-2]}00"}
    log = await ask(tmp_path, ServerConfig(otlp_endpoint=collector.url), headers=headers)

    assert collector.posted == []
    assert access_line(log)["trace"] == TRACE


@pytest.mark.anyio
async def test_a_failed_request_is_a_span_with_its_error(tmp_path: Path, collector: Collector) -> None:
    await ask(tmp_path, ServerConfig(otlp_endpoint=f"{collector.url}/custom/path"), status=400)
    root, _ = collector.tree()

    assert {path for path, _ in collector.posted} == {"/custom/path"}
    assert root.name == "text_completion m"
    assert root.status.code == root.status.STATUS_CODE_ERROR
    assert attributes(root)["error.type"] == "invalid_value"


@pytest.mark.anyio
async def test_a_trace_is_named_in_the_log_also_where_none_is_made(tmp_path: Path) -> None:
    log = await ask(tmp_path, ServerConfig(), headers={"traceparent": PARENT})

    assert access_line(log)["trace"] == TRACE


@pytest.mark.anyio
async def test_a_collector_that_is_not_there_harms_nothing(tmp_path: Path) -> None:
    log = await ask(tmp_path, ServerConfig(otlp_endpoint="http://127.0.0.1:1"))

    assert "traces cannot be exported to http://127.0.0.1:1/v1/traces" in log


@pytest.mark.parametrize(
    "header",
    [
        "", "nonsense", f"ff-{TRACE}-b7ad6b7169203331-01", f"00-{'0' * 32}-b7ad6b7169203331-01",
        f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE.upper()}-b7ad6b7169203331-01", f"{PARENT}-more",
    ],
)  # fmt: skip
def test_a_bad_traceparent_is_none(header: str) -> None:
    assert read_context([header]) is None
    assert read_context([PARENT, PARENT]) is None


def test_a_traceparent_of_a_later_version_may_say_more() -> None:
    found = read_context([f"01-{TRACE}-b7ad6b7169203331-01-more"], ["a=1", "b=2"])

    assert found is not None
    assert (found.hex_id, found.is_sampled, found.state) == (TRACE, True, "a=1,b=2")


def test_a_collector_that_fails_is_left_alone_for_a_while() -> None:
    class Inner(SpanExporter):
        def __init__(self) -> None:
            self.asked = 0
            self.result = SpanExportResult.FAILURE

        def export(self, spans: Any) -> SpanExportResult:
            self.asked += 1
            return self.result

    inner, now = Inner(), [0.0]
    exporter = PatientExporter(inner, "http://x", lambda: now[0])
    for _ in range(3):
        assert exporter.export([]) is SpanExportResult.FAILURE
    assert inner.asked == 1
    now[0], inner.result = PAUSE_S, SpanExportResult.SUCCESS
    for _ in range(2):
        assert exporter.export([]) is SpanExportResult.SUCCESS
    assert inner.asked == 3


def test_opentelemetry_is_not_imported_where_no_traces_are_made() -> None:
    check = "import sys, gateway.main; assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    subprocess.run([sys.executable, "-c", check], check=True)
    assert invalid_endpoint_reason("") is None
