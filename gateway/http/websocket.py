"""uvicorn's WebSocket protocol with the limits that it lacks, for a connection that `GuardedProtocol` hands over.

| item | bound |
|---|---|
| a message | `max_body`, 120 s, 4,096 fragments; beyond 64 KiB its memory is reserved as it arrives |
| messages that were not processed yet | one read of the socket, after which reading pauses |
| a client that does not read | WRITE_TIMEOUT_S; its own messages and pings are not read meanwhile |
"""

import asyncio
import logging
import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import httptools
from starlette.types import Scope
from uvicorn.config import Config
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.frames import CloseCode, Frame
from websockets.http11 import Request
from websockets.server import ServerProtocol

from gateway.errors import ApiError
from gateway.http.bodies import ADVANCE_RESERVE_BYTES, BODY_TIMEOUT_S
from gateway.http.connection_limits import Connections, Opening, StallCheck
from gateway.http.direct_write import unsent_bytes
from gateway.request.body_memory import LARGE_BYTES, BodyLease
from gateway.request.record import ClientLeft, Header

log = logging.getLogger(__name__)
# uvicorn logs each handshake and each malformed message, so any client that can connect could fill the log.
log.setLevel(logging.CRITICAL)

KEY: Final = "mlxd.websocket"
# The client's machine acknowledges pings even if the client does not answer them. A machine that is gone does not, and
# its connection is dropped after WRITE_TIMEOUT_S.
PING_INTERVAL_S: Final = 20.0
FRAGMENTS_MAX: Final = 4096
# Limits of the library's own parser for heads. A longer head is left to the HTTP parser.
LINE_BYTES_MAX: Final = 8000
FIELDS_MAX: Final = 120
VERSION: Final = b"13"
_NONCE: Final = re.compile(rb"[A-Za-z0-9+/]{22}==")


@dataclass(frozen=True, slots=True)
class WebSocketRules:
    """Paths at which WebSockets are served, the maximum size of a message, and a maker of leases for its memory."""

    paths: frozenset[bytes]
    max_bytes: Callable[[], int]
    lease: Callable[[], BodyLease]


def is_handshake(
    rules: WebSocketRules, parser: httptools.HttpRequestParser, url: bytes, headers: Sequence[Header]
) -> bool:
    """Whether a request is a WebSocket handshake at a path with WebSockets. Any other offer is answered by HTTP."""
    fields = dict(headers)
    is_small = len(headers) <= FIELDS_MAX and all(len(name) + len(value) <= LINE_BYTES_MAX for name, value in headers)
    has_body = b"content-length" in fields or b"transfer-encoding" in fields
    return (
        parser.get_method() == b"GET"
        and parser.get_http_version() == "1.1"
        and url.partition(b"?")[0] in rules.paths
        and fields.get(b"upgrade", b"").lower() == b"websocket"
        and fields.get(b"sec-websocket-version") == VERSION
        and _NONCE.fullmatch(fields.get(b"sec-websocket-key", b"")) is not None
        # A name that comes twice has an ambiguous value.
        and len([name for name, _ in headers if name == b"upgrade" or name.startswith(b"sec-websocket-")])
        == len([name for name in fields if name == b"upgrade" or name.startswith(b"sec-websocket-")])
        and is_small
        and not has_body
    )


class IncomingMessage(NamedTuple):
    """A message of the client; `text` is None for a binary one. The receiver closes the lease."""

    text: str | None
    lease: BodyLease


class GuardedWebSocket(WebSocketsSansIOProtocol):
    """Protocol of one connection after its HTTP handshake. The app accepts or refuses it by ASGI, and then uses the
    methods of this class.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        loop: asyncio.AbstractEventLoop,
        connections: Connections,
        rules: WebSocketRules,
        handshake: Opening | None,
    ) -> None:
        super().__init__(config, server_state, app_state, loop)
        self.logger = log
        # Compression is not offered: a small message could become a large one.
        self.conn = ServerProtocol(max_size=rules.max_bytes(), logger=log)
        self.ping_interval, self.ping_timeout = PING_INTERVAL_S, None
        self._registry = connections
        self._rules = rules
        self._handshake = handshake
        self._stall_check = StallCheck()
        # Key to whose share the memory of messages counts.
        self._owner = ""
        self._lease = rules.lease()
        # Leases of the messages that the app has not received yet.
        self._leases: deque[BodyLease] = deque()
        self._reserving: asyncio.Task[None] | None = None
        self._message_timer: asyncio.TimerHandle | None = None
        # Held while messages are written in pieces.
        self._message_lock = asyncio.Lock()

    # -- the app's side ----------------------------------------------------------------------------------------------

    async def accept(self, owner: str, headers: Sequence[Header]) -> None:
        """Finish the handshake. Raises `ClientLeft`."""
        self._owner = self._lease.owner = owner
        try:
            await self.send({"type": "websocket.accept", "headers": headers})
        except ClientDisconnected:
            raise ClientLeft from None
        self._resume_reading()

    async def next_message(self) -> IncomingMessage | None:
        """Return the client's next message; None once the connection is closed, by either side."""
        while (message := await self.receive())["type"] != "websocket.disconnect":
            if message["type"] == "websocket.receive":
                return IncomingMessage(message.get("text"), self._leases.popleft())
        return None

    @property
    def is_open(self) -> bool:
        """False if the client has left, or if `write` would have to wait for the client; use `send_text` then."""
        return self.writable.is_set() and not (self._is_over or self._message_lock.locked())

    @property
    def _is_over(self) -> bool:
        return self.disconnected or self.close_sent or self.transport.is_closing()

    def write(self, messages: Sequence[bytes]) -> None:
        """Write text messages at once."""
        for message in messages:
            self.conn.send_text(message)
        self.transport.write(b"".join(self.conn.data_to_send()))

    async def send_text(self, messages: Sequence[bytes]) -> None:
        """Write text messages once the client can take more. Does nothing if the connection is closed."""
        async with self._message_lock:
            await self.writable.wait()
            if messages and not self._is_over:
                self.write(messages)

    async def begin_pieces(self) -> None:
        """Keep all others from writing messages, until `end_pieces`."""
        await self._message_lock.acquire()

    async def send_piece(self, data: bytes, *, is_first: bool, is_last: bool) -> None:
        """Write a piece of a text message, as `send_text` does. https://www.rfc-editor.org/rfc/rfc6455#section-5.4"""
        await self.writable.wait()
        if self._is_over:
            return
        if is_first:
            self.conn.send_text(data, fin=is_last)
        else:
            self.conn.send_continuation(data, fin=is_last)
        self.transport.write(b"".join(self.conn.data_to_send()))

    def end_pieces(self) -> None:
        """Allow all to write messages again."""
        self._message_lock.release()

    async def close(self, code: int, reason: str = "") -> None:
        """Close the connection, after all that was written before."""
        await self.writable.wait()
        if not self._is_over:
            await self.send({"type": "websocket.close", "code": code, "reason": reason})

    def drop(self, reason: str) -> None:
        """End the connection without a word, because of its client's behaviour."""
        self._registry.drop(self, reason)

    def mark(self, is_busy: bool) -> None:
        """Mark the connection as busy or idle; an idle one may be closed for a new one."""
        (self._registry.mark_busy if is_busy else self._registry.mark_idle)(self)

    # -- the connection's side ---------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        # Nothing is read before the app has accepted.
        self.transport.pause_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._registry.remove(self)
        self._stop_message_timer()
        if self._reserving is not None:
            self._reserving.cancel()
        for lease in (self._lease, *self._leases):
            lease.close()
        super().connection_lost(exc)

    def abort(self) -> None:
        self.transport.abort()

    def shutdown(self) -> None:
        """Do nothing unless the connection is closing: the app closes it when its responses have ended."""
        if self.close_sent:
            super().shutdown()

    def check_stalled(self) -> None:
        is_growing = self.writable.is_set() and not self.transport.is_closing()
        if self._stall_check.is_stalled(unsent_bytes(self.transport, self._handshake), is_growing):
            self.drop("write_timeout")

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_over or not self.handshake_complete:
            return
        if not self.writable.is_set():
            # Pings are answered, so a client that sends but does not read would fill the memory.
            self.transport.pause_reading()
        self._bound_message()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._resume_reading()

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if self.response.status_code == 101:
            # The request's task has not started yet.
            self.scope[KEY] = self  # type: ignore[typeddict-unknown-key]

    def handle_cont(self, event: Frame) -> None:
        if len(self.frames) >= FRAGMENTS_MAX:
            self._fail(CloseCode.POLICY_VIOLATION, f"A message may have {FRAGMENTS_MAX} fragments.")
        else:
            super().handle_cont(event)

    def send_receive_event_to_app(self) -> None:
        if not self.close_sent:
            self._leases.append(self._lease)
            self._lease = self._rules.lease()
            self._lease.owner = self._owner
        super().send_receive_event_to_app()

    def _resume_reading(self) -> None:
        if not (self.read_paused or self._reserving is not None or self._is_over):
            self.transport.resume_reading()

    def _bound_message(self) -> None:
        """Limit the time and the memory of a message that has not arrived completely."""
        size = len(self.conn.reader.buffer) + (self.conn.current_size or 0)
        if size == 0:
            self._stop_message_timer()
            return
        if self._message_timer is None:
            reason = "The message did not arrive in time."
            self._message_timer = self.loop.call_later(BODY_TIMEOUT_S, self._fail, CloseCode.POLICY_VIOLATION, reason)
        if size > max(LARGE_BYTES, self._lease.size_bytes) and self._reserving is None:
            self.transport.pause_reading()
            self._reserving = self.loop.create_task(self._reserve(size + ADVANCE_RESERVE_BYTES))

    async def _reserve(self, size_bytes: int) -> None:
        try:
            await self._lease.reach(size_bytes)
        except ApiError as error:
            self._fail(CloseCode.TRY_AGAIN_LATER, error.message)
        finally:
            self._reserving = None
        if self.writable.is_set():
            self._resume_reading()

    def _stop_message_timer(self) -> None:
        if self._message_timer is not None:
            self._message_timer.cancel()
            self._message_timer = None

    def _fail(self, code: CloseCode, reason: str) -> None:
        if not self._is_over:
            self.conn.fail(code, reason[:100])
            self.handle_parser_exception()


def websocket_of(scope: Scope) -> GuardedWebSocket:
    """Return the connection of an ASGI scope of the type `websocket`."""
    socket = scope[KEY]
    assert isinstance(socket, GuardedWebSocket)
    return socket
