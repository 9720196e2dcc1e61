"""TLS handshake of a new connection: counted as a connection from its first moment, and ended at its deadline."""

import asyncio
import ssl
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from uvicorn.config import Config
from uvicorn.server import ServerState

# What uvloop itself puts between a socket and a protocol. Its `start_tls` cannot: reading has begun before its first
# step, and what has been read then is lost.
from uvloop.loop import SSLProtocol  # type: ignore[attr-defined]  # its stub leaves it out

from gateway.http.connection import GuardedProtocol
from gateway.http.connection_limits import Connections
from gateway.http.tls import Tls

HANDSHAKE_S: Final = 10.0
# What a connection may hold of an answer that is not taken, as on plain TCP: the default of TLS is eight times that.
UNSENT_BYTES: Final = 64 * 1024


class Handshake(asyncio.Protocol):
    """The protocol of a TCP connection, which gives way to TLS and `GuardedProtocol` over it.

    A handshake that fails, or takes longer than the deadline, ends the connection and is counted; nothing is logged.
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
    ) -> None:
        self._registry = connections
        self._tls = tls
        self._handshake_s = handshake_s
        self._server_connections = server_state.connections
        self._make_inner = lambda: GuardedProtocol(
            config, server_state, app_state, _loop, connections=connections, handshake=self
        )
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        peer = transport.get_extra_info("peername")
        if not self._registry.admit(self, str(peer[0]) if peer else ""):
            # It cannot be told: an answer would need the handshake.
            transport.abort()
            return
        self._server_connections.add(self)  # type: ignore[arg-type]  # uvicorn calls `shutdown`, and nothing else
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
        # Before anything is read.
        transport.set_protocol(secured)
        secured.connection_made(transport)

    def finish(self, transport: asyncio.Transport) -> None:
        """Leave the place in the registry to the protocol that `transport`, which is TLS, now has."""
        self._leave()
        transport.set_write_buffer_limits(UNSENT_BYTES)

    def unsent(self) -> int:
        """Bytes that TLS has handed on and the system has not taken."""
        return self._transport.get_write_buffer_size()

    def give_way(self) -> None:
        self._transport.abort()

    def shutdown(self) -> None:
        """The server ends."""
        self._transport.abort()

    def look(self) -> None:
        """Nothing waits for the client."""

    def _end(self, waiter: asyncio.Future[None]) -> None:
        self._leave()
        # A client that has left is no error; the deadline aborts.
        if isinstance(waiter.exception(), ssl.SSLError | ConnectionAbortedError):
            self._registry.dropped("handshake")

    def _leave(self) -> None:
        self._registry.remove(self)
        self._server_connections.discard(self)  # type: ignore[arg-type]


def listener_protocol(connections: Connections, tls: Tls | None) -> Callable[..., asyncio.Protocol]:
    """The protocol of a listener's connections, for uvicorn."""
    if tls is None:
        return partial(GuardedProtocol, connections=connections)
    return partial(Handshake, connections=connections, tls=tls)
