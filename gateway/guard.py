"""uvicorn's HTTP protocol with limits that it lacks: the size of a request's head, and the time to send it."""

import asyncio
import logging
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.outlet import KEY, Outlet

log = logging.getLogger(__name__)
# uvicorn warns of each malformed request: anybody who can connect could fill the log.
log.setLevel(logging.ERROR)

# Claude Code and Codex send about 4 KiB.
HEAD_BYTES_MAX: Final = 64 * 1024
# From the connection, or the answer before, to the last header.
HEAD_TIMEOUT_S: Final = 75.0
# For the rest of a body whose request was answered already: a client that would hear of it must first finish sending.
LINGER_S: Final = 10.0

# Between two looks at whether a client that closed its half is still there; the last one is repeated.
PROBES_S: Final = (0.01, 0.05, 0.25, 1.0, 5.0)

_TOO_LARGE: Final = b'{"error":{"message":"The request headers are too large.","type":"invalid_request_error",' \
    b'"param":null,"code":"headers_too_large"}}'  # fmt: skip


# Every client skips as many of these as come before its answer, also http.client, which takes 102 for the answer.
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_COMMENT: Final = b"3\r\n:\n\n\r\n"


class HeadTooLarge(Exception):
    """Ends the parsing of a request."""


class GuardedProtocol(HttpToolsProtocol):
    """One connection. Its parser keeps an unfinished head in memory, so the bytes fed to it are counted.

    One timer at a time, which never ends a connection while an answer is being written.
    """

    head_timeout_s = HEAD_TIMEOUT_S
    linger_s = LINGER_S

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.logger = log
        self._head_bytes = 0
        self._is_in_head = True
        self._has_ended_head = False
        self._has_request = False
        # What is answered while newer requests wait behind it: uvicorn knows only of the newest.
        self._answered: RequestResponseCycle | None = None
        self._is_too_large = False
        self._is_half_closed = False
        self._prober: asyncio.TimerHandle | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm(self.head_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        if self._prober is not None:
            self._prober.cancel()
        super().connection_lost(exc)
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()

    def eof_received(self) -> bool:  # type: ignore[override]
        """A client that closed its half may still read the answer, and looks like one that has left.

        What tells them apart is how they take something that means nothing: the machine of one that has left resets
        the connection, and the write after that fails.
        """
        cycle = self.cycle if self._has_request else None
        if cycle is None or cycle.response_complete or cycle.more_body or self.scope["http_version"] != "1.1":
            return False
        self._is_half_closed = True
        self._probe(0)
        return True

    def _probe(self, number: int) -> None:
        cycle = self.cycle
        if cycle.response_complete or self.transport.is_closing():
            return
        # While one waits for the answer before its own, nothing can be put in between.
        if not self.pipeline:
            if not cycle.response_started:
                self.transport.write(_CONTINUE)
            elif cycle.chunked_encoding:
                # Only streams of events are chunked, and each chunk is whole events.
                self.transport.write(_COMMENT)
        delay_s = PROBES_S[min(number, len(PROBES_S) - 1)]
        self._prober = self.loop.call_later(delay_s, self._probe, number + 1)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        was_in_head = self._is_in_head
        self._has_ended_head = False
        super().data_received(data)
        is_all_head = was_in_head and self._is_in_head and not self._has_ended_head
        if is_all_head and not self.transport.is_closing():
            # All of these bytes belong to a head that is not complete.
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES_MAX:
                self._is_too_large = True
                self.send_400_response("")
            elif self._deadline is None:
                self._arm(self.head_timeout_s)

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > HEAD_BYTES_MAX:
            self._is_too_large = True
            raise HeadTooLarge  # the parser makes an error of its own of it
        self._is_in_head = False
        self._has_ended_head = self._has_request = True
        self._head_bytes = 0
        self._disarm()
        super().on_headers_complete()
        if not self.pipeline:
            self._answered = self.cycle
        # Its task has not had a turn yet.
        self.scope[KEY] = Outlet(self.cycle)  # type: ignore[typeddict-unknown-key]

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_in_head = True
        if self.cycle.response_complete:
            # uvicorn's own timer for an idle connection was ended by the bytes of this late body.
            self._arm(self.head_timeout_s)

    def on_response_complete(self) -> None:
        has_more = bool(self.pipeline)
        if has_more:
            self._answered = self.pipeline[-1][0]
        super().on_response_complete()
        if self._is_half_closed and not has_more and not self.transport.is_closing():
            self.transport.close()
            return
        if self.cycle.response_complete and self.cycle.more_body and not self.transport.is_closing():
            self._arm(self.linger_s)

    def send_400_response(self, msg: str) -> None:
        if not self._is_too_large:
            super().send_400_response(msg)
            return
        head = (
            b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head % len(_TOO_LARGE) + _TOO_LARGE)
        self.transport.close()

    def _arm(self, timeout_s: float) -> None:
        self._disarm()
        self._deadline = self.loop.call_later(timeout_s, self._expire)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expire(self) -> None:
        self._deadline = None
        if self._has_request and not self.cycle.response_complete:
            self._arm(self.head_timeout_s)
        elif not self.transport.is_closing():
            self.transport.close()
