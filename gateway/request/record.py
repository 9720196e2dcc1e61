"""Record of one HTTP request: facts for the access log and traces, the caller, and headers for the answer.

Phases of a request and their durations.

Trace context, as clients send it in headers: https://www.w3.org/TR/trace-context/

Headers of an answer that name parts of the request which were ignored or not followed exactly.
"""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final, Protocol

from starlette.types import Scope

from gateway.access.caller import NOBODY, Caller
from gateway.config.address import UNKNOWN, Address
from gateway.control_types import RequestTiming
from gateway.media.read_media import MediaLease
from gateway.request.body_memory import BodyLease
from protocol.from_worker import Usage
from protocol.to_worker import Media

NO_USAGE: Final = Usage(0, 0, 0)


@dataclass(slots=True)
class Phases:
    """Durations of a request's phases in seconds. Of several sequences, the longest duration counts.

    `loading_from` and `sent_at` are seconds after the request's arrival, None before these events. `load` is any wait
    for the model: for a load, for memory or for a new worker. The worker reports `queue`, `prefill` and `decode`.
    """

    loading_from: float | None = None
    load: float = 0.0
    sent_at: float | None = None
    queue: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    # Sums of what workers have reported, and the longest pause and rest in milliseconds.
    usage: Usage = NO_USAGE

    def add(self, usage: Usage) -> None:
        """Add the worker's timings of a finished sequence."""
        self.queue = max(self.queue, usage.queue_ms / 1000)
        self.prefill = max(self.prefill, usage.prefill_ms / 1000)
        self.decode = max(self.decode, usage.decode_ms / 1000)
        known = self.usage
        self.usage = Usage(
            prompt=known.prompt + usage.prompt,
            cached=known.cached + usage.cached,
            completion=known.completion + usage.completion,
            reasoning=known.reasoning + usage.reasoning,
            restored=known.restored + usage.restored,
            drafted=known.drafted + usage.drafted,
            drafts_accepted=known.drafts_accepted + usage.drafts_accepted,
            preemptions=known.preemptions + usage.preemptions,
            grammar_waits=known.grammar_waits + usage.grammar_waits,
            paused_ms=max(known.paused_ms, usage.paused_ms),
            rested_ms=max(known.rested_ms, usage.rested_ms),
        )

    def timing(self, total_s: float, first_token_s: float | None, resumes: int) -> RequestTiming:
        """Return the timing of the request until now."""
        usage = self.usage
        return RequestTiming(
            total_ms=_ms(total_s),
            ttft_ms=None if first_token_s is None else _ms(first_token_s),
            load_ms=_ms(self.load),
            queue_ms=_ms(self.queue),
            prefill_ms=_ms(self.prefill),
            decode_ms=_ms(self.decode),
            paused_ms=round(usage.paused_ms, 1),
            rested_ms=round(usage.rested_ms, 1),
            prompt_tokens=usage.prompt,
            cached_tokens=usage.cached,
            restored_tokens=usage.restored,
            completion_tokens=usage.completion,
            reasoning_tokens=usage.reasoning,
            drafted_tokens=usage.drafted,
            accepted_tokens=usage.drafts_accepted,
            preemptions=usage.preemptions,
            grammar_waits=usage.grammar_waits,
            resumes=resumes,
        )

    def cut(self, now: float, prefill_from: float | None, first_token: float | None) -> None:
        """Estimate the phases of a request that ended before its worker reported them.

        All arguments are seconds after the request's arrival.
        """
        if self.sent_at is None:
            return
        started = prefill_from if prefill_from is not None else first_token
        self.queue = max(self.queue, (now if started is None else started) - self.sent_at)
        if started is not None:
            self.prefill = max(self.prefill, (now if first_token is None else first_token) - started)
        if first_token is not None:
            self.decode = max(self.decode, now - first_token)

    def spans(self) -> Iterator[tuple[str, float, float]]:
        """Yield the name, the start and the duration of each phase that took time."""
        if self.loading_from is not None and self.load > 0:
            yield "load", self.loading_from, self.load
        start = self.sent_at or 0.0
        for name, length in (("queue", self.queue), ("prefill", self.prefill), ("decode", self.decode)):
            if length > 0:
                yield name, start, length
            start += length

    def fields(self) -> dict[str, float]:
        """Return the durations as fields of a log line, in milliseconds."""
        named = {"load": self.load, "queue": self.queue, "prefill": self.prefill, "decode": self.decode}
        return {f"{name}_ms": _ms(length) for name, length in named.items() if length > 0}


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 1)


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


Header = tuple[bytes, bytes]
# Key of a scope with the caller of a batch's request.
BATCH_CALLER: Final = "mlxd.batch_caller"


class ChunkWriter(Protocol):
    """Writes pieces of a streamed body to the connection."""

    @property
    def is_open(self) -> bool: ...

    def write(self, data: bytes) -> None: ...


class PromptComparison(Protocol):
    """Comparison of a request's prompt with an earlier one, once its worker knows both."""

    async def run(self, rid: int, epoch: int) -> None: ...


class Dialect(StrEnum):
    """Dialect of a client, which determines the shape of errors."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    OLLAMA = "ollama"
    TYPESAFE = "typesafe"


class ClientLeft(Exception):
    """Raised if the client closes the connection before it gets its answer."""


@dataclass(slots=True)
class RequestRecord:
    """Facts about one request for logs and traces, and its leases. Only the request's task changes the record."""

    id: str
    method: str
    path: str
    client: Address = UNKNOWN
    dialect: Dialect = Dialect.OPENAI
    started: float = field(default_factory=time.perf_counter)
    # Clock of `started` and of the request's deadline.
    clock: Callable[[], float] = time.perf_counter
    status: int = 0
    model: str | None = None
    # Upstream that serves the request or served it last; empty if this daemon does.
    served_by: str = ""
    stream: bool = False
    # Whether the request runs only while its model has no other request. Its times say nothing about the service.
    is_of_batch_class: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    # Ids of the request's sequences, and the finish reasons of the sequences that have ended.
    rids: tuple[int, ...] = ()
    finishes: list[str] = field(default_factory=list[str])
    phases: Phases = field(default_factory=Phases)
    trace: TraceContext | None = None
    first_token_s: float | None = None
    # Id of the answer, in dialects whose answers have one. If the request waited for its model, `waited_for` is the
    # reason for which the model had been unloaded, or the state of its worker.
    answer_id: str = ""
    waited_for: str = ""
    # Whether the generation goes on without the request, with a record of its own.
    is_detached: bool = False
    # Comparison that the client has asked for.
    comparison: PromptComparison | None = None
    # Epoch of the worker that has the request, and how many workers were lost while they had it.
    epoch: int = 0
    resumes: int = 0
    outcome: str = ""
    # Whether the ledger has counted the request.
    is_recorded: bool = False
    detail: str = ""
    caller: Caller = NOBODY
    # Whether the request is a chat whose next turn the worker can prefill.
    has_next_turn: bool = False
    # Size of the request's body, including stored items that the request continues, and the lease for that memory.
    body_bytes: int = 0
    lease: BodyLease | None = None
    # `media` lists images, video and audio without their bytes. `media_bytes` is the size of those bytes, and
    # `media_lease` the lease for them. `encoded_bytes` is the encoded size of media and documents in the body, less
    # the size of the texts of the documents.
    media: tuple[Media, ...] = ()
    media_bytes: int = 0
    encoded_bytes: int = 0
    media_lease: MediaLease | None = None
    # Headers for the endpoint's answer. They are also sent with a refusal if the endpoint had set them before.
    headers: list[Header] = field(default_factory=list[Header])
    # Headers that middleware adds to every answer: `always` is known in advance, the others are computed when it is
    # sent.
    always: list[Header] = field(default_factory=list[Header])
    late_headers: Callable[[], list[Header]] | None = None
    # Writes to the connection without ASGI's `send`. None if the stream is captured or the server has no such writer.
    writer: ChunkWriter | None = None

    def timing(self) -> RequestTiming:
        """Return the times until now."""
        return self.phases.timing(self.clock() - self.started, self.first_token_s, self.resumes)

    def detached(self, lease: BodyLease, media_lease: MediaLease) -> "RequestRecord":
        """Return a copy that outlives the request and takes over its leases. The request gets the given
        leases instead.
        """
        own = replace(self, phases=Phases(), finishes=[], headers=list(self.headers), writer=None)
        self.lease, self.media_lease = lease, media_lease
        self.is_detached = True
        return own


def record_of(scope: Scope) -> RequestRecord:
    """Return the record of a request, which the middleware has stored in its scope."""
    record = scope["mlxd.record"]
    assert isinstance(record, RequestRecord)
    return record


IGNORED: Final = b"x-mlxd-ignored"
IGNORED_NAMES_MAX: Final = 20
IGNORED_NAME_CHARS: Final = 40


def ignored_header(names: Sequence[str]) -> list[Header]:
    """Return the header `x-mlxd-ignored`, which lists fields of the request that have no effect."""
    return _names_header(IGNORED, names)


def with_ignored(headers: Sequence[Header], names: Sequence[str]) -> list[Header]:
    """Return headers whose `x-mlxd-ignored` lists these names too."""
    values = [value for name, value in (*headers, *ignored_header(names)) if name == IGNORED]
    others = [header for header in headers if header[0] != IGNORED]
    return [*others, (IGNORED, b", ".join(values))] if values else others


def deviations_header(names: Sequence[str]) -> list[Header]:
    """Return the header `x-mlxd-relaxed`, which lists how the answer deviates from the request.

    It names keywords of a schema that were not enforced, a video shown as images, and approximations of the model, such
    as `kv-bits-8` or a sparse prefill.
    """
    return _names_header(b"x-mlxd-relaxed", names)


def truncated_header(truncated: tuple[int, int]) -> list[Header]:
    """Return the header `x-mlxd-truncated`: how many turns and tokens were left out of a prompt that was too long."""
    turns, tokens = truncated
    return [(b"x-mlxd-truncated", f"{turns};{tokens}".encode())] if tokens else []


def served_by_header(upstream: str) -> list[Header]:
    """Return the header `x-mlxd-served-by`, which names the upstream that serves the request, if one does."""
    return [(b"x-mlxd-served-by", _header_safe(upstream).encode())] if upstream else []


def _names_header(header: bytes, names: Sequence[str]) -> list[Header]:
    """Return a header with these names. Its length is limited and unsafe characters are replaced."""
    if not names:
        return []
    shown = [_header_safe(name) for name in names[:IGNORED_NAMES_MAX]]
    if len(names) > IGNORED_NAMES_MAX:
        shown.append(f"+{len(names) - IGNORED_NAMES_MAX}")
    return [(header, ", ".join(shown).encode())]


def _header_safe(name: str) -> str:
    cut = name[:IGNORED_NAME_CHARS]
    return "".join(c if c.isascii() and (c.isalnum() or c in "_.-[]") else "_" for c in cut) or "_"
