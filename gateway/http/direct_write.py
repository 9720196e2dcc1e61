"""Direct writes to the transport, used for pieces of streams and for HTTP/1.0 bodies, which have no chunks."""

import asyncio
import fcntl
import socket
import struct
import sys
import termios
from typing import Final, Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

KEY: Final = "mlxd.writer"
# macOS's equivalent of Linux's TIOCOUTQ, for which Python has no name.
SO_NWRITE: Final = 0x1024


class EventWriter(Protocol):
    """Writer of events that may come in several pieces."""

    @property
    def is_within_event(self) -> bool:
        """True if only a part of an event was written, so that nothing but the rest of this event may follow."""
        ...

    @is_within_event.setter
    def is_within_event(self, is_within: bool) -> None: ...


class DirectWriter:
    """Writes pieces of a chunked body by a plain call instead of ASGI's `send`. The connection's protocol makes it.

    It may be used only while no task waits in `send`, and after the first piece has gone through `send`.
    """

    __slots__ = ("_cycle", "_flow", "_transport", "is_within_event")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._transport = cycle.transport
        self.is_within_event = False

    @property
    def socket(self) -> socket.socket:
        """The connection's socket, used to identify its peer."""
        return self._transport.get_extra_info("socket")

    @property
    def is_open(self) -> bool:
        """False if the client has left, or if a write would have to wait for the client; use `send` then."""
        cycle = self._cycle
        return not (self._flow.write_paused or cycle.disconnected or cycle.response_complete) and bool(
            cycle.chunked_encoding
        )

    def write(self, data: bytes) -> None:
        """Write one chunk, which must not be empty. https://www.rfc-editor.org/rfc/rfc9112#section-7.1"""
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def cut_off(self) -> None:
        """Close the connection before the end of the body, so that the client notices that the body is incomplete."""
        self._cycle.disconnected = True
        self._transport.close()

    def write_plainly(self) -> None:
        """Send the body without chunks. Call it before the body's first piece."""
        self._cycle.chunked_encoding = False

    def expect(self, size: int) -> None:
        """Allow `size` more bytes of a body without chunks."""
        self._cycle.expected_content_length += size


class CloseDelimited:
    """ASGI app for an HTTP/1.0 request, whose body of unknown length ends when the connection closes.

    https://www.rfc-editor.org/rfc/rfc9112#section-6.1
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer: DirectWriter = scope[KEY]
        is_sized = True

        async def send_plainly(message: Message) -> None:
            nonlocal is_sized
            if message["type"] == "http.response.start":
                is_sized = any(name.lower() == b"content-length" for name, _ in message["headers"])
                if not is_sized:
                    writer.write_plainly()
            elif not is_sized:
                writer.expect(len(message.get("body", b"")))
            await send(message)

        await self._app(scope, receive, send_plainly)


def writer_of(scope: Scope) -> DirectWriter | None:
    """Return the connection's direct writer; None if another server than ours runs the app."""
    return scope.get(KEY)


class EncryptedWrites(Protocol):
    """TLS below a transport, as far as its buffer is concerned."""

    def unsent(self) -> int: ...


def unsent_bytes(transport: asyncio.Transport, tls: EncryptedWrites | None) -> int:
    """Return the number of written bytes that the client has not acknowledged."""
    size = transport.get_write_buffer_size()
    if tls is not None:
        size += tls.unsent()
    # The system's own buffer counts too: a socket becomes writable only when a third of it is free, which may be
    # megabytes.
    return size and size + queued_bytes(transport.get_extra_info("socket"))


def queued_bytes(connection: socket.socket) -> int:
    """Return the number of bytes that the system buffers until a client acknowledges them; 0 if the system does not
    report it.
    """
    try:
        if sys.platform == "darwin":
            return connection.getsockopt(socket.SOL_SOCKET, SO_NWRITE)
        return struct.unpack("i", fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)))[0]
    except OSError:
        return 0
