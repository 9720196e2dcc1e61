"""HTTP edge of a simulated gateway: uvicorn's server with the gateway's own protocol, on connections in memory."""

import asyncio
from collections import deque
from functools import partial

import uvicorn

from gateway.app import App
from gateway.daemon import server_settings
from gateway.http.connection import GuardedProtocol
from gateway.http.connection_limits import public_connections
from tests.simulation.virtual_loop import VirtualLoop

OPEN_FILES = 1024


class SimulatedSocket:
    """Socket of a connection, without a descriptor."""

    def __init__(self, port: int) -> None:
        self._port = port

    def getpeername(self) -> tuple[str, int]:
        return "127.0.0.1", self._port

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", 8484

    def fileno(self) -> int:
        raise OSError("a simulated socket has no descriptor")


class SimulatedTransport(asyncio.Transport):
    """Both ends of a connection. The server writes into a buffer, from which the client takes as much as it likes."""

    def __init__(self, loop: VirtualLoop, port: int, buffer_bytes: int) -> None:
        super().__init__({"socket": SimulatedSocket(port), "peername": ("127.0.0.1", port)})
        self._loop = loop
        self._buffer_bytes = buffer_bytes
        self._protocol: asyncio.Protocol
        # Bytes that the client has not taken, and pieces that the server has not read; None is the client's end.
        self._untaken = bytearray()
        self._unread: deque[bytes | None] = deque()
        self._is_reading = True
        self._is_paused = self._is_closing = self._is_cut = self._has_ended = self._is_lost = False
        # Whether the client has closed its socket, so that the next write finds nobody.
        self._has_client_closed = False
        # Set while there are bytes for the client, or no more can come.
        self.readable = asyncio.Event()

    def begin(self, protocol: asyncio.Protocol) -> None:
        self._protocol = protocol
        protocol.connection_made(self)

    # -- the server's end ----------------------------------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._is_cut or self._has_ended:
            return
        if self._has_client_closed:
            self.reset()
            return
        self._untaken += data
        self.readable.set()
        if len(self._untaken) > self._buffer_bytes and not self._is_paused:
            self._is_paused = True
            self._protocol.pause_writing()

    def get_write_buffer_size(self) -> int:
        return len(self._untaken)

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self._has_ended = True
        self.readable.set()

    def pause_reading(self) -> None:
        self._is_reading = False

    def resume_reading(self) -> None:
        self._is_reading = True
        self._loop.call_soon(self._read)

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            if not self._untaken or self._has_client_closed:
                self._loop.call_soon(self._lose, None)

    def abort(self) -> None:
        self._cut(None)

    # -- the client's end ----------------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether the client gets no more bytes."""
        return self._has_client_closed or (not self._untaken and (self._is_lost or self._has_ended))

    def send(self, data: bytes | None) -> None:
        """Send bytes; None ends what the client sends."""
        self._unread.append(data)
        self._read()

    def take(self, size: int) -> bytes:
        data = bytes(self._untaken[:size])
        del self._untaken[:size]
        if self._is_paused and len(self._untaken) <= self._buffer_bytes // 4:
            self._is_paused = False
            self._protocol.resume_writing()
        if not self._untaken and not self.is_over:
            self.readable.clear()
            if self._is_closing:
                self._loop.call_soon(self._lose, None)
        return data

    def leave(self) -> None:
        """Close the client's socket. The server reads an end, and learns by its next write that the client has left."""
        self._untaken.clear()
        self.send(None)
        self._has_client_closed = True
        self.readable.set()
        if self._is_closing:
            self._loop.call_soon(self._lose, None)

    def reset(self) -> None:
        """Lose the connection as by a reset."""
        self._has_client_closed = True
        self._cut(ConnectionResetError("reset by the client"))

    # -- both ----------------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        while self._is_reading and self._unread and not self._is_closing:
            data = self._unread.popleft()
            if data is not None:
                self._protocol.data_received(data)
            elif not self._protocol.eof_received():
                self.close()

    def _cut(self, error: Exception | None) -> None:
        self._is_closing = self._is_cut = True
        self._untaken.clear()
        self._loop.call_soon(self._lose, error)

    def _lose(self, error: Exception | None) -> None:
        if not self._is_lost:
            self._is_lost = self._is_cut = True
            self._protocol.connection_lost(error)
            self.readable.set()


class HttpEdge:
    """Server of one gateway without its listening sockets. `tasks` gets the tasks of the requests."""

    def __init__(self, app: App, loop: VirtualLoop, tasks: set[asyncio.Task[None]]) -> None:
        live, metrics = app.services.live, app.services.metrics
        self._loop = loop
        self._connections = public_connections(live, metrics, OPEN_FILES)
        settings = server_settings(app.entry, partial(GuardedProtocol, connections=self._connections))
        self._server = uvicorn.Server(settings)
        self._server.servers = []
        settings.load()
        self._server.lifespan = settings.lifespan_class(settings)
        self._server.server_state.tasks = tasks
        self._transports: list[SimulatedTransport] = []
        self.is_shut = False

    def connect(self, port: int, buffer_bytes: int) -> SimulatedTransport:
        transport = SimulatedTransport(self._loop, port, buffer_bytes)
        config, state = self._server.config, self._server.server_state
        self._transports.append(transport)
        transport.begin(GuardedProtocol(config, state, {}, self._loop, connections=self._connections))
        return transport

    @property
    def open_connections(self) -> int:
        return len(self._server.server_state.connections)

    async def shut_down(self) -> None:
        """End as a server that was asked to exit; then the process's end closes what is still open."""
        self.is_shut = True
        await self._server.shutdown()
        self.die()

    def die(self) -> None:
        """Lose all connections at the end of the process."""
        self.is_shut = True
        for transport in self._transports:
            transport.abort()
