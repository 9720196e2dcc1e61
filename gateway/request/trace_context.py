"""Trace context, as clients send it in headers: https://www.w3.org/TR/trace-context/"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

TRACESTATE_CHARS_MAX: Final = 512

_PARENT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Position of a request in its client's trace (W3C Trace Context)."""

    trace_id: int
    span_id: int
    is_sampled: bool
    state: str = ""

    @property
    def hex_id(self) -> str:
        return f"{self.trace_id:032x}"


def read_context(parents: Sequence[str], states: Sequence[str] = ()) -> TraceContext | None:
    """Parse the `traceparent` and `tracestate` headers. Returns None if they are missing or invalid."""
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
