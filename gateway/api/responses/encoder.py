"""Encoding of canonical events as a Responses stream, or as one whole response.

State of a response before its generation: the fields of the request with defaults filled in.

All events about a response repeat these fields. A large one is encoded once, as `Raw`, which replaces the decoded value
in the response. An event is encoded with a gap in its place, and the value is sent in slices.

OpenAI's `prompt_cache_diagnostics`: why the prompt of another response was not a prefix of this one.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from gateway.api.common.request_fields import MakeExtras, no_extras, sampling_values
from gateway.api.responses import response as out
from gateway.api.responses.items import ResponseOutput
from gateway.api.responses.request import ResponsesRequest, SummarizedReasoning, TextSpec, Toolbox, plain_choice
from gateway.api.responses.response import PromptCacheDiagnostics
from gateway.config.settings import ModelConfig
from gateway.errors import ApiError
from gateway.http.bodies import SLICE_BYTES
from gateway.http.direct_write import EventWriter
from gateway.request.body_memory import LARGE_BYTES
from gateway.request.record import RequestRecord
from gateway.request.why_slow import Diagnosis
from gateway.services import Services
from protocol.from_worker import Delta, MissCode

# A field of at least this size is large.
LARGE_FIELD_BYTES: Final = 64 * 1024
# Values of the fields in events that leave the large ones out.
_EMPTY: Final[dict[str, Any]] = {
    "instructions": None,
    "tools": [],
    "tool_choice": "auto",
    "text": out.TextEcho(out.FormatEcho()),
    "metadata": {},
    "user": UNSET,
    "prompt_cache_key": None,
    "safety_identifier": None,
}
# Before the digit of a field in an event with gaps. JSON has no such byte.
_GAP: Final = b"\0"

_encode = msgspec.json.Encoder().encode


def echo(
    request: ResponsesRequest, box: Toolbox, model: ModelConfig, response_id: str, created_at: int, is_stored: bool
) -> out.Response:
    """Return the response with which a stream begins."""
    sampling = sampling_values(request, model.sampling)
    return out.Response(
        id=response_id,
        created_at=created_at,
        status="queued" if request.background else "in_progress",
        background=bool(request.background),
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        model=model.full_name,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        presence_penalty=sampling["presence_penalty"],
        frequency_penalty=sampling["frequency_penalty"],
        previous_response_id=request.previous_response_id,
        prompt_cache_key=request.prompt_cache_key,
        reasoning=_reasoning(request.reasoning),
        safety_identifier=request.safety_identifier,
        store=is_stored,
        temperature=sampling["temperature"],
        text=_text(request.text),
        tool_choice=plain_choice(request.tool_choice),
        tools=box.echo,
        top_logprobs=request.top_logprobs or 0,
        top_p=sampling["top_p"],
        truncation=request.truncation or "disabled",
        user=UNSET if request.user is None else request.user,
        metadata=request.metadata or {},
    )


def _reasoning(spec: SummarizedReasoning | None) -> out.ReasoningEcho:
    return out.ReasoningEcho(None, None) if spec is None else out.ReasoningEcho(spec.effort, spec.summary)


def _text(spec: TextSpec | None) -> out.TextEcho:
    if spec is None:
        return out.TextEcho(out.FormatEcho())
    fields = {} if spec.format is None else msgspec.structs.asdict(spec.format)
    return out.TextEcho(out.FormatEcho(**fields), spec.verbosity or "medium")


def with_large_encoded(response: out.Response) -> out.Response:
    """Return the response with its large fields encoded. May run in any thread."""
    encoded = {name: _encode(value) for name, value in _fields(response) if value is not UNSET}
    large = {name: Raw(data) for name, data in encoded.items() if len(data) >= LARGE_FIELD_BYTES}
    return msgspec.structs.replace(response, **large) if large else response


def large_values(response: out.Response) -> dict[int, memoryview]:
    """Return the encoded large fields by the numbers of their gaps."""
    return {number: memoryview(value) for number, (_, value) in enumerate(_fields(response)) if isinstance(value, Raw)}


def large_bytes(response: out.Response) -> int:
    """Return the size of the encoded large fields."""
    return sum(map(len, large_values(response).values()))


def without_large(response: out.Response) -> out.Response:
    """Return the response with its large fields left empty."""
    large = {name: _EMPTY[name] for name, value in _fields(response) if isinstance(value, Raw)}
    return msgspec.structs.replace(response, **large) if large else response


def with_gaps(response: out.Response) -> out.Response:
    """Return the response with gaps in place of its large fields, for JSON that is sent in parts."""
    names = list(_EMPTY)
    large = {names[number]: Raw(_GAP + b"%d" % number) for number in large_values(response)}
    return msgspec.structs.replace(response, **large) if large else response


def pieces(data: bytes) -> list[bytes | int]:
    """Split JSON at its gaps: the number of each gap stands between two pieces."""
    first, *rest = data.split(_GAP)
    split: list[bytes | int] = [first]
    for piece in rest:
        split += [int(piece[:1]), piece[1:]]
    return split


def parts(response: out.Response, data: bytes) -> Sequence[memoryview]:
    """Return JSON in parts, with the large fields of the response in its gaps."""
    values = large_values(response)
    return [values[piece] if isinstance(piece, int) else memoryview(piece) for piece in pieces(data)]


def slices(response: out.Response, data: bytes, writer: EventWriter | None) -> Iterator[bytes] | None:
    """Return slices of events whose gaps have the large fields of the response; None if the events are small and have
    no gaps.
    """
    if len(data) <= SLICE_BYTES and _GAP not in data:
        return None
    return _slices(response, data, writer)


def _slices(response: out.Response, data: bytes, writer: EventWriter | None) -> Iterator[bytes]:
    if writer is not None:
        writer.is_within_event = True
    for part in parts(response, data):
        for at in range(0, len(part), SLICE_BYTES):
            yield bytes(part[at : at + SLICE_BYTES])
    if writer is not None:
        writer.is_within_event = False


def _fields(response: out.Response) -> list[tuple[str, Any]]:
    return [(name, getattr(response, name)) for name in _EMPTY]


MakeDiagnostics = Callable[[], PromptCacheDiagnostics | UnsetType]

_REASONS: Final[dict[str, str]] = {
    MissCode.TOOLS: "tools_changed",
    MissCode.TOOL_ORDER: "tools_changed",
    MissCode.SETTINGS: "reasoning_effort_changed",
    MissCode.TRUNCATED: "context_compacted",
    MissCode.SALT: "prompt_cache_key_changed",
}


def no_diagnostics() -> UnsetType:
    return UNSET


def diagnostics_of(services: Services, record: RequestRecord, request: ResponsesRequest) -> MakeDiagnostics:
    """Return the function that makes the field of the answer, and begin the comparison that the request asks for.
    Raises `BadRequest`.
    """
    if not (answer_id := request.comparison_id):
        return no_diagnostics
    diagnosis = Diagnosis(services, record, answer_id)
    record.comparison = diagnosis
    return lambda: _diagnostics(diagnosis)


def _diagnostics(diagnosis: Diagnosis) -> PromptCacheDiagnostics:
    if diagnosis.other is None:
        return PromptCacheDiagnostics("comparison_response_not_found")
    if diagnosis.is_other_model:
        return PromptCacheDiagnostics("cache_miss", "model_changed", diagnosis.other.timing.prompt_tokens, 0)
    cause, explained = diagnosis.difference, diagnosis.explained
    if cause is not None and explained is not None:
        reason = _REASONS.get(cause.code, "input_changed")
        words = diagnosis.words(cause)
        return PromptCacheDiagnostics("cache_miss", reason, cause.tokens, explained.common, words)
    is_hit = explained is not None and diagnosis.is_compared and not explained.causes
    return PromptCacheDiagnostics("cache_hit" if is_hit else "unavailable")


# Approximate size of a delta's text, which is about a word.
DELTA_BYTES: Final = 8


@dataclass(slots=True)
class ResponseRun:
    """Run of one response, from its request to its last state. Its request owns it; another request may `cancel` it.

    `keep` stores a state; its result is whether the state was stored. `stop` ends the sequences. `request_bytes` is the
    size of the request's body, a part of which the response repeats. `last` is the last state; None until the response
    has ended. `kept` is the result of keeping it.
    """

    response: out.Response
    output: ResponseOutput
    now: Callable[[], int]
    keep: Callable[[out.Response], Future[bool]]
    stop: Callable[[Sequence[int]], None]
    request_bytes: int = 0
    diagnostics: MakeDiagnostics = no_diagnostics
    extras: MakeExtras = no_extras
    is_cancelled: bool = False
    # Whether the response is cut short for new input, with which another response continues it.
    is_steered: bool = False
    last: out.Response | None = None
    kept: Future[bool] | None = None
    _rids: Sequence[int] = field(default_factory=tuple[int, ...])

    def bind(self, rids: Sequence[int]) -> None:
        assert len(rids) == 1, "a response is one sequence"
        self._rids = rids
        if self.is_cancelled or self.is_steered:
            self.stop(rids)

    def snapshot(self) -> out.Response:
        """Return the current state of the response."""
        return self.last or self._state("cancelled" if self.is_cancelled else self.response.status)

    @property
    def size_bytes(self) -> int:
        """Approximate size of the response as JSON."""
        return self.request_bytes + DELTA_BYTES * self.output.deltas

    def cancel(self) -> out.Response:
        """Cancel the response and return its new state."""
        self.is_cancelled = True
        if self._rids:
            self.stop(self._rids)
        return self._state("cancelled")

    def steer(self) -> None:
        """Cut the response short, unless its tokens are complete or it calls a tool: the client needs whole calls."""
        if self.last is None and self.output.finish is None and not self.output.calls():
            self.is_steered = True
            if self._rids:
                self.stop(self._rids)

    def complete(self) -> out.Response:
        """Return the last state of a response whose sequence has ended without failing. It may have been cancelled."""
        usage = None if self.output.usage is None else out.ResponseUsage.of(self.output.usage)
        if self.is_cancelled:
            last = msgspec.structs.replace(self._state("cancelled"), usage=usage)
        elif self.output.is_cut:
            last = msgspec.structs.replace(
                self._state("incomplete"), usage=usage, incomplete_details=out.ResponseIncomplete("max_output_tokens")
            )
        else:
            last = msgspec.structs.replace(self._state("completed"), usage=usage, completed_at=self.now())
        return self._end(last)

    def fail(self, error: ApiError) -> out.Response:
        """Return the last state of a response whose sequence failed or was cancelled."""
        last = self._state("cancelled" if self.is_cancelled else "failed")
        if self.is_steered and not self.is_cancelled and error.code == "aborted":
            last = msgspec.structs.replace(
                self._state("incomplete"), incomplete_details=out.ResponseIncomplete("steered")
            )
        elif not self.is_cancelled:
            last = msgspec.structs.replace(last, error=out.ErrorInfo.of(error))
            if not self.output.deltas and self.request_bytes >= LARGE_BYTES:
                # If the request was refused, its large fields are not stored with the error.
                last = msgspec.structs.replace(last, instructions=None, tools=[])
        return self._end(last)

    def _end(self, last: out.Response) -> out.Response:
        self.last = last = msgspec.structs.replace(
            last, prompt_cache_diagnostics=self.diagnostics(), x_mlxd=self.extras()
        )
        self.kept = self.keep(last)
        return last

    def _state(self, status: str) -> out.Response:
        return msgspec.structs.replace(self.response, status=status, output=self.output.items())


class ResponseEncoder:
    """Encoder of the events of a response's stream, which also collects the whole response."""

    def __init__(self, run: ResponseRun) -> None:
        self._run = run
        # `begin` writes the events 0 and 1, and may run after the first `encode`, so the number starts at 2.
        self._number = 2

    def bind(self, rids: Sequence[int]) -> None:
        self._run.bind(rids)

    def begin(self, prompt_tokens: int) -> bytes:
        response = with_gaps(self._run.response)
        return out.stream_bytes([out.ResponseCreated(response), out.InProgress(response)], 0)[0]

    def encode(self, deltas: Sequence[Delta]) -> bytes:
        add = self._run.output.add
        return self._write([event for delta in deltas for event in add(delta)])

    def keepalive(self) -> bytes:
        # An event is sent, because Codex's idle timer is reset by events but not by comments.
        return self._write([out.InProgress(without_large(self._run.response))])

    def error(self, error: ApiError) -> bytes:
        events = self._run.output.cut() if self._run.is_steered else []
        last = with_gaps(self._run.fail(error))
        return self._write([*events, out.ResponseFailed(last) if last.error is not None else out.IncompleteEvent(last)])

    def note(self, event: Struct) -> bytes:
        """Return an event about the response that is not part of its generation."""
        return self._write([event])

    def end(self) -> bytes:
        events = self._run.output.close()
        last = with_gaps(self._run.complete())
        is_whole = last.status == "completed"
        return self._write([*events, out.ResponseCompleted(last) if is_whole else out.IncompleteEvent(last)])

    def slices(self, data: bytes, writer: EventWriter | None) -> Iterator[bytes] | None:
        """Return the slices in which these events are sent; None if they are sent as they are."""
        return slices(self._run.response, data, writer)

    def add(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            self._run.output.add(delta)

    def result(self) -> bytes:
        self._run.output.close()
        return _encode(with_gaps(self._run.complete()))

    def parts(self, data: bytes) -> Sequence[memoryview]:
        """Return the parts of the whole answer, whose large fields are not in `result`."""
        return parts(self._run.response, data)

    def _write(self, events: Sequence[Struct]) -> bytes:
        data, self._number = out.stream_bytes(events, self._number)
        return data


class QueuedStream(ResponseEncoder):
    """Encoder of a background response's events, the first of which reports that it is queued."""

    def skip(self, count: int) -> int:
        """Leave out `count` event numbers and return the next number."""
        self._number += count
        return self._number

    def queued(self) -> bytes:
        """Return the events of a response that has not started."""
        self._number = 0
        response = with_gaps(self._run.response)
        return self._write([out.ResponseCreated(response), out.ResponseQueued(response)])

    def started(self) -> bytes:
        """Return the event of the response's start on a worker."""
        self._run.response = msgspec.structs.replace(self._run.response, status="in_progress")
        return self._write([out.InProgress(with_gaps(self._run.response))])
