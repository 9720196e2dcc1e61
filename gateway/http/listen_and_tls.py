"""Listening sockets of the daemon, TLS of the public listener, and the handshake of a new connection.

The daemon's listening sockets. If a socket cannot be opened, the error is readable.

TLS of the public listener. The certificate is reloaded when its files change.

TLS handshake of a new connection. It counts as a connection from its first moment and ends at its deadline.
"""

# uvloop's own TLS layer between socket and protocol. uvloop's `start_tls` is not used, because it would lose data that
# was read before its first step.
import asyncio
import errno
import logging
import os
import resource
import socket
import ssl
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from uvicorn.config import Config
from uvicorn.server import ServerState
from uvloop.loop import SSLProtocol  # type: ignore[attr-defined]  # its stub leaves it out

from gateway.config.certificate import Certificate, CertificateUnusable, date, is_exposed, load
from gateway.config.settings import TlsConfig
from gateway.http.connection import GuardedProtocol
from gateway.http.connection_limits import Connections
from gateway.http.websocket import WebSocketRules
from gateway.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

BACKLOG: Final = 4096
# Each client needs one descriptor. macOS refuses more than its own maximum even if the hard limit is infinite.
FILES_WANTED: Final = (65536, 10240)


class CannotListen(Exception):
    """Raised when the address cannot be used; the message gives the reason."""


def listen_tcp(host: str, port: int) -> list[socket.socket]:
    """Open one socket for each address of `host`, all on one port. Raises `CannotListen`."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise CannotListen(f"the host {host!r} cannot be resolved: {error.strerror}") from error
    except UnicodeError:
        raise CannotListen(f"{host!r} is not a name of a host") from None
    sockets: list[socket.socket] = []
    for family, kind, protocol, _, address in dict.fromkeys(addresses):
        try:
            listener = socket.socket(family, kind, protocol)
        except OSError:
            continue  # This machine lacks the address family.
        sockets.append(listener)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind((address[0], port, *address[2:]))
            listener.listen(BACKLOG)
        except OSError as error:
            close_all(sockets)
            raise CannotListen(_why(error, host, port)) from error
        # If the port is 0, the system chooses one for the first address, and the other addresses use the same.
        port = listener.getsockname()[1]
    if not sockets:
        raise CannotListen(f"no address of {host!r} is available on this machine")
    return sockets


def listen_unix(path: Path) -> socket.socket:
    """Open a socket file of mode 0600 in place of a stale one. The home's lock must be held. Raises `CannotListen`."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # The umask makes the socket private from the start: between bind and chmod, any user could connect.
    mask = os.umask(0o177)
    try:
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise CannotListen(f"cannot listen on {path}: {error.strerror or error}") from error
    finally:
        os.umask(mask)
    return listener


def close_all(sockets: list[socket.socket]) -> None:
    for one in sockets:
        one.close()


def file_limit() -> int:
    """Return the limit of this process's open files."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def raise_file_limit() -> int:
    """Raise the limit of open files as far as the system allows, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in FILES_WANTED:
        target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if 0 <= soft < target:
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
            except (ValueError, OSError):
                continue
            return target
    return soft


def _why(error: OSError, host: str, port: int) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return f"port {port} on {host} is in use; stop what listens there, or choose another port with --port"
        case errno.EACCES:
            return f"port {port} needs more rights than this user has; choose one above 1023 with --port"
        case errno.EADDRNOTAVAIL:
            return f"{host} is not an address of this machine; see --host"
        case _:
            return f"cannot listen on {host} port {port}: {error.strerror or error}"


CHECK_INTERVAL_S: Final = 60.0

# Device, inode, size and modification time of a file, which identify its version.
Stamp = tuple[int, int, int, int] | None


class Tls:
    """Certificate for new connections. Open connections keep the certificate with which they began."""

    def __init__(self, config: TlsConfig, metrics: Metrics) -> None:
        """Load the certificate. Raises `CertificateUnusable`."""
        self._certificate_path = Path(config.certificate)
        self._key_path = Path(config.key)
        self._metrics = metrics
        self._lock = asyncio.Lock()
        self._stamps = self._current_stamps()
        self._certificate = self._load()
        metrics.certificate_expiry = lambda: self._certificate.expires

    @property
    def context(self) -> ssl.SSLContext:
        """TLS context for one new connection."""
        return self._certificate.context

    async def run(self) -> None:
        """Check the files periodically, until cancelled."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            await self.refresh()

    async def refresh(self) -> None:
        """Load the files if they have changed. If they are unusable, the old certificate stays, and this is logged
        once.
        """
        async with self._lock:
            # Stamps are taken before the files are read, so that the next check finds a change made in between.
            stamps = await asyncio.to_thread(self._current_stamps)
            if stamps == self._stamps:
                return
            self._stamps = stamps
            try:
                self._certificate = await asyncio.to_thread(self._load)
            except CertificateUnusable as error:
                self._metrics.certificate_loads["failed"] += 1
                log.error("TLS certificate not reloaded, the previous one stays in force: %s", error)
            else:
                self._metrics.certificate_loads["ok"] += 1
                log.info(
                    "TLS certificate reloaded for new connections, valid until %s", date(self._certificate.expires)
                )

    def _load(self) -> Certificate:
        certificate = load(self._certificate_path, self._key_path)
        if is_exposed(self._key_path):
            log.warning("TLS key is readable by every user of this machine: chmod 600 %s", self._key_path)
        return certificate

    def _current_stamps(self) -> tuple[Stamp, Stamp]:
        return _stamp(self._certificate_path), _stamp(self._key_path)


def _stamp(path: Path) -> Stamp:
    try:
        # Links are followed, because renewing a certificate often changes only the target of a link.
        facts = os.stat(path)
    except OSError:
        return None
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns


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
