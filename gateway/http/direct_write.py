"""Bodies on their way to the socket: the short way of a streamed piece, and those of HTTP/1.0, which has no chunks."""

import fcntl
import socket
import struct
import sys
import termios
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

KEY: Final = "mlxd.outlet"
# macOS's option for what Linux's TIOCOUTQ tells; Python has no name for it.
SO_NWRITE: Final = 0x1024


class DirectWriter:
    """Plain call that writes a piece of a chunked body as ASGI's `send` does. Made by the connection's protocol.

    Only while no task waits in `send`, and after the first piece has gone through it.
    """

    __slots__ = ("_cycle", "_flow", "_transport", "is_within_event")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._transport = cycle.transport
        # Nothing may be put behind what was written but the rest of its event.
        self.is_within_event = False

    @property
    def socket(self) -> socket.socket:
        """The connection's, to ask who is at its other end."""
        return self._transport.get_extra_info("socket")

    @property
    def is_open(self) -> bool:
        """False when a write would have to wait for the client, or it has left: `send` knows what to do then."""
        cycle = self._cycle
        return not (self._flow.write_paused or cycle.disconnected or cycle.response_complete) and bool(
            cycle.chunked_encoding
        )

    def write(self, data: bytes) -> None:
        """One chunk, not empty. https://www.rfc-editor.org/rfc/rfc9112#section-7.1"""
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def cut_off(self) -> None:
        """Close the connection behind what was written, without an end of the body: its client knows that more was to
        come."""
        self._cycle.disconnected = True
        self._transport.close()

    def write_plainly(self) -> None:
        """Send what follows without chunks. Before the body's first piece."""
        self._cycle.chunked_encoding = False

    def expect(self, size: int) -> None:
        """Let this much more of a body without chunks pass."""
        self._cycle.expected_content_length += size


class CloseDelimited:
    """The app for a request of HTTP/1.0: a body of no stated length ends with the connection.

    https://www.rfc-editor.org/rfc/rfc9112#section-6.1
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outlet: DirectWriter = scope[KEY]
        is_sized = True

        async def send_plainly(message: Message) -> None:
            nonlocal is_sized
            if message["type"] == "http.response.start":
                is_sized = any(name.lower() == b"content-length" for name, _ in message["headers"])
                if not is_sized:
                    outlet.write_plainly()
            elif not is_sized:
                outlet.expect(len(message.get("body", b"")))
            await send(message)

        await self._app(scope, receive, send_plainly)


def outlet_of(scope: Scope) -> DirectWriter | None:
    """The connection's outlet; None where the server is not ours."""
    return scope.get(KEY)


def queued_bytes(connection: socket.socket) -> int:
    """Bytes that the system holds for a client which has not acknowledged them; 0 where it does not tell."""
    try:
        if sys.platform == "darwin":
            return connection.getsockopt(socket.SOL_SOCKET, SO_NWRITE)
        return struct.unpack("i", fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)))[0]
    except OSError:
        return 0
