"""Encoding of canonical events as a Responses stream, or as one whole response."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final

import msgspec
from msgspec import Struct

from gateway.api.common.extras import MakeExtras, no_extras
from gateway.api.responses import response as out
from gateway.api.responses.diagnostics import MakeDiagnostics, no_diagnostics
from gateway.api.responses.echo import parts, slices, with_gaps, without_large
from gateway.api.responses.items import ResponseOutput
from gateway.errors import ApiError
from gateway.http.direct_write import EventWriter
from gateway.request.body_memory import LARGE_BYTES
from protocol.from_worker import Delta

# Approximate size of a delta's text, which is about a word.
DELTA_BYTES: Final = 8

_encode = msgspec.json.Encoder().encode


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
