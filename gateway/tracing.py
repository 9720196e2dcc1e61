"""The trace context that a client sends along (W3C Trace Context), and whether traces can be sent at all.

OpenTelemetry is an extra: `otel.py`, which needs it, is imported only where `[server] otlp_endpoint` is set.
"""

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from gateway.http import Record

PACKAGES: Final = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")
TRACESTATE_CHARS_MAX: Final = 512

_PARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Where a request stands in its client's trace."""

    trace_id: int
    span_id: int
    is_sampled: bool
    state: str = ""

    @property
    def hex_id(self) -> str:
        return f"{self.trace_id:032x}"


def read_context(parents: Sequence[str], states: Sequence[str] = ()) -> TraceContext | None:
    """What the `traceparent` and `tracestate` headers say; None when there is none, or none that is valid."""
    match = _PARENT.fullmatch(parents[0].strip()) if len(parents) == 1 else None
    if match is None:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    if version == "ff" or (version == "00" and rest) or int(trace_id, 16) == 0 or int(span_id, 16) == 0:
        return None
    state = ",".join(states)
    return TraceContext(
        int(trace_id, 16),
        int(span_id, 16),
        bool(int(flags, 16) & 1),
        state if len(state) <= TRACESTATE_CHARS_MAX else "",
    )


def bad_endpoint(endpoint: str) -> str | None:
    """Why traces cannot be sent there, if so."""
    if not endpoint:
        return None
    try:
        parts = urlsplit(endpoint)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_url = False
    if not is_url:
        return f"{endpoint!r} is no URL such as 'http://127.0.0.1:4318'"
    if not all(map(_is_installed, PACKAGES)):
        return "traces need OpenTelemetry, which is not installed: pip install 'mlxd[otel]'"
    return None


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:
        return False


class Tracer(Protocol):
    """What makes spans of requests; `otel.Tracer` is the one there is."""

    def export(self, record: "Record") -> str:
        """Queue the spans of a request that has ended. Returns the trace's id."""
        ...

    def close(self) -> None: ...
