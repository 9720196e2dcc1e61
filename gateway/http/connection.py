"""uvicorn's HTTP protocol with the limits that it lacks: bounds on sizes and times of all that a client sends and
reads, and one answer for each request.

| item | bound |
|---|---|
| a head | 64 KiB, 75 s |
| trailers, which are dropped | 8 KiB |
| a piece of a head, of trailers or of framing that does not end | 64 KiB |
| pipelined requests | 100, and 64 KiB beyond the packet that brought the first of them |
| the rest of a body after its answer | 10 s, parsed up to 256 KiB, dropped up to 64 MiB |
| an answer that is not read | WRITE_TIMEOUT_S |
"""

import asyncio
import contextlib
import logging
import os
from http import HTTPStatus
from typing import Any, Final

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from gateway.errors import BUSY_RETRY_AFTER_S, SERVER, ApiError, error_headers, openai_body
from gateway.http.connection_limits import STALLS_MAX, Connections, Opening, StallCheck
from gateway.http.direct_write import KEY, CloseDelimited, DirectWriter, unsent_bytes, writer_of
from gateway.http.websocket import GuardedWebSocket, WebSocketRules, is_handshake

log = logging.getLogger(__name__)
# uvicorn warns of each malformed request, so any client that can connect could fill the log.
log.setLevel(logging.ERROR)

# This is generous: Claude Code and Codex send headers of about 4 KiB.
HEAD_BYTES_MAX: Final = 64 * 1024
TRAILER_BYTES_MAX: Final = 8 * 1024
# The overhead of a header field in addition to its text, as HTTP/2 counts it.
# https://www.rfc-editor.org/rfc/rfc9113#section-6.5.2
FIELD_BYTES: Final = 32
# This time starts with the connection or the previous answer, and ends with the last header.
HEAD_TIMEOUT_S: Final = 75.0
# Many clients read the answer only after they have sent the whole request, so the rest of its body may arrive this long
# after the answer.
LINGER_S: Final = 10.0
LATE_BYTES_MAX: Final = 256 * 1024
DROPPED_BYTES_MAX: Final = 64 * 1024 * 1024
PIPELINED_MAX: Final = 100
PIPELINED_BYTES_MAX: Final = 64 * 1024

# Delays between probes that check whether a half-closed client is still there. The last delay repeats.
PROBES_S: Final = (0.01, 0.05, 0.25, 1.0, 5.0)
READ_BYTES: Final = 65536

# Clients skip any number of 100s before an answer, but Python's http.client would take a 102 for the answer.
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_COMMENT: Final = b"3\r\n:\n\n\r\n"


def _answer(error: ApiError) -> bytes:
    body = openai_body(error)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
        (b"x-content-type-options", b"nosniff"),
        *error_headers(error),
    ]
    status = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n".encode()
    return status + b"".join(b"%b: %b\r\n" % header for header in headers) + b"\r\n" + body


_FULL: Final = _answer(
    ApiError(503, "Too many connections.", type=SERVER, code="too_many_connections", retry_after_s=BUSY_RETRY_AFTER_S)
)
_INVALID: Final = _answer(ApiError(400, "Invalid HTTP request received.", code="invalid_http"))
_TOO_LARGE: Final = _answer(ApiError(431, "The request headers are too large.", code="headers_too_large"))
_NO_TUNNEL: Final = _answer(ApiError(405, "CONNECT is not allowed here.", code="method_not_allowed"))


class RefusedConnection(Exception):
    """Raised to stop parsing the input of a connection.

    It has the reason, and the answer to send unless another answer is being sent.
    """

    def __init__(self, answer: bytes, reason: str) -> None:
        super().__init__(reason)
        self.answer = answer
        self.reason = reason


_HEAD_TOO_LARGE: Final = (_TOO_LARGE, "headers")


class GuardedProtocol(HttpToolsProtocol):
    """Protocol of one connection.

    Its parser keeps an unfinished head in memory, so the bytes fed to the parser are counted. There is at most one
    deadline (`_deadline`) at a time, and it never ends a connection while a request is being answered. A client that
    does not read its answer is dropped by `check_stalled`.
    """

    head_timeout_s = HEAD_TIMEOUT_S
    linger_s = LINGER_S

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        connections: Connections,
        handshake: Opening | None = None,
        websockets: WebSocketRules | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.logger = log
        self._registry = connections
        self._websockets = websockets
        # `_handshake` is None on plain TCP and on the unix socket.
        self._handshake = handshake
        self._is_in_head = True
        # Number of further bytes that the current head, or its trailers, may take.
        self._field_bytes_left = HEAD_BYTES_MAX
        # Whether the last input completed a head or a part of a body, and the number of bytes fed since such an input.
        self._has_progressed = False
        self._bytes_without_progress = 0
        self._refused: RefusedConnection | None = None
        # Whether the head that was just parsed offers an upgrade to another protocol.
        self._is_offered = False
        # The request that is being answered. uvicorn only keeps the newest request, and newer ones may be waiting.
        self._answered: RequestResponseCycle | None = None
        self._pipelined_bytes = 0
        self._late_bytes = 0
        # If true, all further input is dropped without being parsed.
        self._drops_input = False
        self._dropped_bytes = 0
        self._prober: asyncio.TimerHandle | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._stall_check = StallCheck()
        # Number of consecutive checks at which the write buffer was full.
        self._full_checks = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._handshake is not None:
            self._handshake.finish(transport)
        if self._registry.admit(self, self.client[0] if self.client else ""):
            self._arm(self.head_timeout_s)
        else:
            self._turn_away()

    def connection_lost(self, exc: Exception | None) -> None:
        self._registry.remove(self)
        self._disarm()
        if self._prober is not None:
            self._prober.cancel()
        super().connection_lost(exc)
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep a half-closed connection, whose client may still read the answer, and probe whether the client has left.

        A half-closed client and one that has left look alike until meaningless data is sent: the machine of a client
        that has left then resets the connection, and the next write fails.
        """
        if self._handshake is not None:
            # TLS connections cannot be half-closed.
            return False
        cycle = self._answered
        if cycle is None or cycle.response_complete or cycle.more_body or cycle.scope["http_version"] != "1.1":
            return False
        if not self._drops_input:
            self._stop_listening()
        self._probe(0)
        return True

    def abort(self) -> None:
        self.transport.abort()

    def check_stalled(self) -> None:
        is_growing = self._is_answering and not self.flow.write_paused and not self.transport.is_closing()
        is_stalled = self._stall_check.is_stalled(unsent_bytes(self.transport, self._handshake), is_growing)
        self._full_checks = self._full_checks + 1 if self.flow.write_paused else 0
        if self._full_checks == STALLS_MAX:
            # A slow reader must not keep new clients out, so its connection counts as idle from now on.
            self._registry.mark_idle(self)
        if is_stalled:
            self._registry.drop(self, "write_timeout")

    def resume_writing(self) -> None:
        super().resume_writing()
        self._full_checks = 0
        if self._is_answering:
            self._registry.mark_busy(self)

    def _turn_away(self) -> None:
        # The answer is written directly to the socket. The transport would write it later, and keep the descriptor
        # until then.
        if self.scheme == "http":
            descriptor = self.transport.get_extra_info("socket").fileno()
            with contextlib.suppress(OSError):
                # Closing a connection with unread input would reset it, and the client would lose the answer.
                os.read(descriptor, READ_BYTES)
            with contextlib.suppress(OSError):
                os.write(descriptor, _FULL)
        self.transport.abort()

    def _probe(self, number: int) -> None:
        cycle = self._answered
        if cycle is None or cycle.response_complete or self.transport.is_closing():
            return
        if not cycle.response_started:
            self.transport.write(_CONTINUE)
        elif cycle.chunked_encoding:
            writer = writer_of(cycle.scope)  # type: ignore[reportArgumentType]  # uvicorn's type is narrower
            # Only the answers that are event streams are chunked.
            if writer is not None and not writer.is_within_event:
                self.transport.write(_COMMENT)
        delay_s = PROBES_S[min(number, len(PROBES_S) - 1)]
        self._prober = self.loop.call_later(delay_s, self._probe, number + 1)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._drops_input:
            self._dropped_bytes += len(data)
            if self._dropped_bytes > DROPPED_BYTES_MAX:
                self._registry.drop(self, "late_body")
            return
        self._unset_keepalive_if_required()
        was_pipelined = bool(self.pipeline)
        self._has_progressed = False
        try:
            if self._feed(data):
                self._count(len(data), was_pipelined)
        except httptools.HttpParserError:
            self._refuse(self._refused or RefusedConnection(_INVALID, "invalid"))
        except RefusedConnection as refused:
            self._refuse(refused)

    def _feed(self, data: bytes) -> bool:
        """Parse input. Returns False if the connection has become a WebSocket."""
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                rest = data[offer.args[0] :]
                if not rest and self._become_websocket():
                    return False
                data = self._decline(rest)
            else:
                return True

    def _become_websocket(self) -> bool:
        """Give the connection to a WebSocket protocol, which answers the handshake. Returns False if the request is no
        handshake that is served here.
        """
        rules = self._websockets
        is_free = not (self._is_answering or self.pipeline or self._drops_input)
        if rules is None or not is_free or not is_handshake(rules, self.parser, self.url, self.headers):
            return False
        self._disarm()
        self.connections.discard(self)
        socket = GuardedWebSocket(
            self.config, self.server_state, self.app_state, self.loop, self._registry, rules, self._handshake
        )
        self._registry.replace(self, socket)
        socket.connection_made(self.transport)
        socket.data_received(self._head(self.headers))
        self.transport.set_protocol(socket)
        return True

    def _head(self, headers: list[tuple[bytes, bytes]]) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, version)]
        return b"".join([*lines, *(b"%b: %b\r\n" % field for field in headers), b"\r\n"])

    def _decline(self, rest: bytes) -> bytes:
        """Parse the request again without its upgrade offer, which RFC 9110 7.8 allows. Returns the bytes to parse.

        With the offer, the parser would leave everything after the head to the other protocol. The parser has no option
        to prevent this.
        """
        head = self._head([field for field in self.headers if field[0] != b"upgrade"])
        self._is_offered = False
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return head + rest

    def _count(self, size: int, was_pipelined: bool) -> None:
        """Count input that completes nothing, belongs to a later request, or arrives after its answer. Raises
        `RefusedConnection` beyond a limit.
        """
        self._bytes_without_progress = 0 if self._has_progressed else self._bytes_without_progress + size
        if self._bytes_without_progress > HEAD_BYTES_MAX:
            raise RefusedConnection(*(_HEAD_TOO_LARGE if self._is_in_head else (_INVALID, "trailers")))
        if self.pipeline:
            self._pipelined_bytes += size if was_pipelined else 0
            if self._pipelined_bytes > PIPELINED_BYTES_MAX:
                raise RefusedConnection(b"", "pipelined")
            # uvicorn has paused reading. Reading must continue here, because otherwise a client that leaves would not
            # be noticed.
            self.flow.resume_reading()
        elif self._is_in_head:
            if not self._has_progressed and self._deadline is None:
                self._arm(self.head_timeout_s)
        elif self.cycle.response_complete:
            self._late_bytes += size
            if self._late_bytes > LATE_BYTES_MAX:
                # Closing the write side shows clients that check a connection before reusing it that this one is
                # closed.
                self._drops_input = True
                if self.transport.can_write_eof():
                    self.transport.write_eof()

    def _refuse(self, refused: RefusedConnection) -> None:
        """Stop parsing. Send the refusal, unless a request would get two answers or answers would come out of order."""
        self._registry.dropped(refused.reason)
        if self._is_answering and (self._is_in_head or self.pipeline):
            self._stop_listening()
            return
        if self._is_in_head or not self.cycle.response_started:
            self.transport.write(refused.answer)
        if self._is_answering:
            # The request's task must not send an answer too.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def _stop_listening(self) -> None:
        """Answer the requests that have arrived completely, then close.

        Further input is read only to notice that the client leaves, and is dropped.
        """
        if self.pipeline and not self._is_in_head:
            # The last request is incomplete and has no answer yet.
            self.pipeline.popleft()
            assert self._answered is not None
            self.cycle = self.pipeline[0][0] if self.pipeline else self._answered
        self.cycle.keep_alive = False
        self._drops_input = True
        self.flow.resume_reading()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._field_bytes_left = HEAD_BYTES_MAX

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._use_field_bytes(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._use_field_bytes(len(name) + len(value) + FIELD_BYTES)
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) == PIPELINED_MAX:
            raise self._refusal(b"", "pipelined")
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise self._refusal(_NO_TUNNEL, "invalid")
            self._is_offered = True
            return
        is_current = self.parser.get_http_version() == "1.1"
        if not is_current:
            self.app = CloseDelimited(self.config.loaded_app)  # type: ignore[arg-type]  # uvicorn's types are narrower
        super().on_headers_complete()
        self._is_in_head = False
        self._has_progressed = True
        self._field_bytes_left = TRAILER_BYTES_MAX
        self._late_bytes = 0
        self._disarm()
        self._registry.mark_busy(self)
        if not self.pipeline:
            self._answered = self.cycle
        if not is_current:
            self.cycle.keep_alive = False
        # The request's task has not started yet.
        self.scope[KEY] = DirectWriter(self.cycle)  # type: ignore[typeddict-unknown-key]

    def on_body(self, body: bytes) -> None:
        self._has_progressed = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_offered:
            return
        super().on_message_complete()
        self._is_in_head = self._has_progressed = True
        if self.cycle.response_complete:
            # uvicorn's own timer for idle connections ended when the rest of this body arrived, so this timer takes its
            # place.
            self._arm(self.head_timeout_s)

    def _use_field_bytes(self, size: int) -> None:
        self._field_bytes_left -= size
        if self._field_bytes_left < 0:
            raise self._refusal(*(_HEAD_TOO_LARGE if self._is_in_head else (_INVALID, "trailers")))

    def _refusal(self, answer: bytes, reason: str) -> RefusedConnection:
        # The error is stored, because the parser replaces it with an error of its own.
        self._refused = RefusedConnection(answer, reason)
        return self._refused

    @property
    def _is_answering(self) -> bool:
        return self._answered is not None and not self._answered.response_complete

    def on_response_complete(self) -> None:
        has_more = bool(self.pipeline)
        if has_more:
            self._answered = self.pipeline[-1][0]
        else:
            self._pipelined_bytes = 0
            self._registry.mark_idle(self)
        super().on_response_complete()
        if self.cycle.response_complete and not self._is_in_head and not self.transport.is_closing():
            self._arm(self.linger_s)

    def _arm(self, timeout_s: float) -> None:
        self._disarm()
        self._deadline = self.loop.call_later(timeout_s, self._expire)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expire(self) -> None:
        self._deadline = None
        if self._is_answering:
            self._arm(self.head_timeout_s)
        elif not self.transport.is_closing():
            self.transport.close()
