"""TLS handshake of a new connection. It counts as a connection from its first moment and ends at its deadline."""

import asyncio
import ssl
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from uvicorn.config import Config
from uvicorn.server import ServerState

# uvloop's own TLS layer between socket and protocol. uvloop's `start_tls` is not used, because it would lose data that
# was read before its first step.
from uvloop.loop import SSLProtocol  # type: ignore[attr-defined]  # its stub leaves it out

from gateway.http.connection import GuardedProtocol
from gateway.http.connection_limits import Connections
from gateway.http.tls import Tls
from gateway.http.websocket import WebSocketRules

HANDSHAKE_S: Final = 10.0
# Maximum size of the buffer for an unread answer, the same as on plain TCP; asyncio's default for TLS is eight times
# that.
UNSENT_BYTES: Final = 64 * 1024


class Handshake(asyncio.Protocol):
    """Protocol of a new TCP connection. TLS, with `GuardedProtocol` on top, replaces it when the handshake is done.

    A handshake that fails or exceeds the deadline ends the connection and is counted, but not logged.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        connections: Connections,
        tls: Tls,
        handshake_s: float = HANDSHAKE_S,
        websockets: WebSocketRules | None = None,
    ) -> None:
        self._registry = connections
        self._tls = tls
        self._handshake_s = handshake_s
        self._server_connections = server_state.connections
        self._make_inner = lambda: GuardedProtocol(
            config, server_state, app_state, _loop, connections=connections, handshake=self, websockets=websockets
        )
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        peer = transport.get_extra_info("peername")
        if not self._registry.admit(self, str(peer[0]) if peer else ""):
            # The client gets no reason: an answer would need a completed handshake.
            transport.abort()
            return
        self._server_connections.add(self)  # type: ignore[arg-type]  # uvicorn only calls `shutdown`
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        waiter.add_done_callback(self._end)
        secured = SSLProtocol(
            loop,
            self._make_inner(),
            self._tls.context,
            waiter,
            server_side=True,
            ssl_handshake_timeout=self._handshake_s,
        )
        # The protocol must change before anything is read.
        transport.set_protocol(secured)
        secured.connection_made(transport)

    def finish(self, transport: asyncio.Transport) -> None:
        """Give the place in the registry to the protocol on top of `transport`, which is TLS."""
        self._leave()
        transport.set_write_buffer_limits(UNSENT_BYTES)

    def unsent(self) -> int:
        """Return how many bytes TLS has written that the system has not accepted yet."""
        return self._transport.get_write_buffer_size()

    def abort(self) -> None:
        self._transport.abort()

    def shutdown(self) -> None:
        """Abort the handshake when the server shuts down."""
        self._transport.abort()

    def check_stalled(self) -> None:
        """Do nothing: no data is pending for the client."""

    def _end(self, waiter: asyncio.Future[None]) -> None:
        self._leave()
        # A client that has left is no error. Exceeding the deadline aborts the connection.
        if isinstance(waiter.exception(), ssl.SSLError | ConnectionAbortedError):
            self._registry.dropped("handshake")

    def _leave(self) -> None:
        self._registry.remove(self)
        self._server_connections.discard(self)  # type: ignore[arg-type]


def listener_protocol(
    connections: Connections, tls: Tls | None, websockets: WebSocketRules | None = None
) -> Callable[..., asyncio.Protocol]:
    """Return uvicorn's protocol factory for a listener's connections."""
    if tls is None:
        return partial(GuardedProtocol, connections=connections, websockets=websockets)
    return partial(Handshake, connections=connections, tls=tls, websockets=websockets)
