"""Limits of the open connections of one listener, in total and per address. At a limit, an idle connection is closed
for a new one.
"""

import logging
import sys
import time
from asyncio import TimerHandle, Transport, get_running_loop
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from gateway.config.address import Address
from gateway.request.routing import LiveConfig
from gateway.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

# File descriptors that are reserved. RESERVED_FILES are for sockets, logs, databases and admin clients.
# FILES_PER_WORKER are for two ZeroMQ connections, a pipe, a process descriptor, and some while the worker starts.
# libzmq ends the process if it has no descriptor left to accept a connection.
RESERVED_FILES: Final = 128
FILES_PER_WORKER: Final = 8
WORKERS_COUNTED: Final = 16
# The reserve is at least 1/16 of the limit. If the limit is large, this costs nothing: only client connections
# would use these descriptors.
RESERVED_FILES_PART: Final = 16
# A daemon for fewer clients than this would be useless, so it refuses to start.
CLIENTS_MIN: Final = 64
# Admin connections are part of the reserve.
ADMIN_MAX: Final = 32
# Part of all connections that one address may have, so that it cannot shut out all others.
ADDRESS_PART: Final = 0.5

REFUSAL_LOG_INTERVAL_S: Final = 60.0
# A client that reads nothing of its answer for this long is disconnected.
WRITE_TIMEOUT_S: Final = 30.0
# Checking a batch of this size takes about a millisecond.
CHECKS_PER_TURN: Final = 1000
# A client is stalled if it has read nothing at this many consecutive checks.
STALLS_MAX: Final = 2

PUBLIC: Final = "public"
ADMIN: Final = "admin"


class TooFewFiles(Exception):
    """Raised when the limit of open files leaves too few for clients; the message explains this."""


class LimitedConnection(Protocol):
    """The part of a connection that the registry uses to end it."""

    def abort(self) -> None:
        """End the connection at once."""
        ...

    def check_stalled(self) -> None:
        """End the connection if its client is stalled, which means that it has read no pending data since earlier
        checks.
        """
        ...


class Opening(LimitedConnection, Protocol):
    """A TLS handshake as the registry sees it. When it is done, the secured connection takes its place."""

    def finish(self, transport: Transport) -> None:
        """Give the place in the registry to the protocol of `transport`."""
        ...

    def unsent(self) -> int:
        """Return the number of encrypted bytes that the system has not accepted yet."""
        ...


class StallCheck:
    """Judges at regular checks whether a client has stopped reading."""

    __slots__ = ("_stalls", "_unsent_bytes")

    def __init__(self) -> None:
        self._unsent_bytes = 0
        self._stalls = 0

    def is_stalled(self, unsent_bytes: int, is_growing: bool) -> bool:
        """Whether the client has read nothing since the earlier checks. Call it once for each check.

        A buffer that `is_growing` does not mean a stalled client. The client is judged once the buffer is full.
        """
        is_stall = 0 < self._unsent_bytes <= unsent_bytes and not is_growing
        self._stalls = self._stalls + 1 if is_stall else 0
        self._unsent_bytes = unsent_bytes
        return self._stalls == STALLS_MAX


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of connections in total and per address."""

    total: int
    per_address: int


@dataclass(slots=True)
class _Peer:
    """Open connections of one address."""

    count: int = 0
    # The connection that has been idle for longest comes first.
    idle: dict[LimitedConnection, None] = field(default_factory=dict[LimitedConnection, None])


class Connections:
    """Registry of one listener's connections, used on the event loop only.

    At the limit, the connection that has been idle longest is closed for a new one, because an idle client can connect
    again for its next request. A new connection is refused only if every other connection has a request and a client
    that reads its answer.
    """

    def __init__(
        self,
        listener: str,
        bounds: Callable[[], Bounds],
        metrics: Metrics,
        is_shared: Callable[[str], bool] = lambda _: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`is_shared` returns whether many clients share an address. Such an address has no limit of its own."""
        self._listener = listener
        self._bounds = bounds
        self._metrics = metrics
        self._is_shared = is_shared
        self._clock = clock
        self._peers: dict[str, _Peer] = {}
        self._open: dict[LimitedConnection, str] = {}
        self._idle: dict[LimitedConnection, None] = {}
        self._timer: TimerHandle | None = None
        self._logged = float("-inf")
        metrics.connections[listener] = lambda: len(self._open)
        metrics.connections_max[listener] = lambda: bounds().total

    def admit(self, connection: LimitedConnection, address: str) -> bool:
        """Count a new, idle connection. Returns False if it must be refused."""
        bounds = self._bounds()
        limit = bounds.total if self._is_shared(address) else bounds.per_address
        address = Address(address).network
        peer = self._peers.get(address)
        if peer is not None and peer.count >= limit and not self._make_room(peer.idle):
            return self._refuse("address", f"{peer.count} connections of {address}")
        if len(self._open) >= bounds.total and not self._make_room(self._idle):
            return self._refuse("total", f"{len(self._open)} connections")
        # Closing an idle connection may have removed the address.
        peer = self._peers.setdefault(address, _Peer())
        peer.count += 1
        self._open[connection] = address
        self.mark_idle(connection)
        if self._timer is None:
            self._arm()
        return True

    def remove(self, connection: LimitedConnection) -> None:
        """Remove a connection that has ended or was refused."""
        address = self._open.pop(connection, None)
        if address is None:
            return
        self._idle.pop(connection, None)
        peer = self._peers[address]
        peer.idle.pop(connection, None)
        peer.count -= 1
        if peer.count == 0:
            del self._peers[address]

    def mark_busy(self, connection: LimitedConnection) -> None:
        """Mark a connection as busy, so that it is not closed for a new one."""
        if connection in self._idle:
            del self._idle[connection]
            del self._peers[self._open[connection]].idle[connection]

    def mark_idle(self, connection: LimitedConnection) -> None:
        """Mark a connection as idle."""
        address = self._open.get(connection)
        if address is not None:
            self._idle[connection] = self._peers[address].idle[connection] = None

    def replace(self, old: LimitedConnection, new: LimitedConnection) -> None:
        """Give the place of a connection to the one that serves its client from now on, which is idle."""
        address = self._open[old]
        self.mark_busy(old)
        del self._open[old]
        self._open[new] = address
        self.mark_idle(new)

    def dropped(self, reason: str) -> None:
        """Count a connection that was ended because of its client's behaviour."""
        self._metrics.connections_dropped[reason] += 1

    def drop(self, connection: LimitedConnection, reason: str) -> None:
        """End a connection at once because of its client's behaviour. Does nothing if it has ended already."""
        if connection in self._open:
            self.remove(connection)
            self.dropped(reason)
            connection.abort()

    def _make_room(self, idle: dict[LimitedConnection, None]) -> bool:
        oldest = next(iter(idle), None)
        if oldest is None:
            return False
        self.drop(oldest, "idle")
        return True

    def _refuse(self, reason: str, text: str) -> bool:
        self._metrics.connections_refused[self._listener, reason] += 1
        if self._clock() - self._logged >= REFUSAL_LOG_INTERVAL_S:
            self._logged = self._clock()
            log.warning("connections to the %s socket are refused: %s, all with requests", self._listener, text)
        return False

    def _arm(self) -> None:
        self._timer = get_running_loop().call_later(WRITE_TIMEOUT_S / STALLS_MAX, self._check_all)

    def _check_all(self) -> None:
        # One timer serves all connections.
        self._timer = None
        if self._open:
            self._check_next(list(self._open))

    def _check_next(self, connections: list[LimitedConnection]) -> None:
        # Connections are checked in small batches, so that streams can continue in between.
        for connection in connections[-CHECKS_PER_TURN:]:
            if connection in self._open:
                connection.check_stalled()
        del connections[-CHECKS_PER_TURN:]
        if connections:
            self._timer = get_running_loop().call_later(0, self._check_next, connections)
        else:
            self._arm()


def public_connections(
    live: LiveConfig,
    metrics: Metrics,
    files: int,
    address_part: float = ADDRESS_PART,
    connections_max: int = sys.maxsize,
) -> Connections:
    """Make the registry for connections of the public API. `files` is the limit of open files, and there are at most
    `connections_max` connections. Raises `TooFewFiles`.
    """
    room = room_for_clients(files, len(live.config.models))
    if room < CLIENTS_MIN:
        raise TooFewFiles(
            f"at most {files} files may be open, and mlxd needs {files - room} for itself and its workers and "
            f"{CLIENTS_MIN} for clients: raise the limit, for example with ulimit -n 4096"
        )

    def bounds() -> Bounds:
        total = min(room_for_clients(files, len(live.config.models)), connections_max)
        return Bounds(total, int(total * address_part))

    return Connections(PUBLIC, bounds, metrics, lambda address: live.proxies.trusts(address))


def admin_connections(live: LiveConfig, metrics: Metrics) -> Connections:
    """Make the registry for connections of the admin socket: few, and not counted by address."""
    return Connections(ADMIN, lambda: Bounds(ADMIN_MAX, ADMIN_MAX), metrics)


def room_for_clients(files: int, models: int) -> int:
    """Return how many connections of clients a limit of open files leaves room for."""
    return files - max(RESERVED_FILES + FILES_PER_WORKER * min(models, WORKERS_COUNTED), files // RESERVED_FILES_PART)
