"""Open connections of one listener: how many there may be, in all and from one address, and which gives way."""

import logging
import time
from asyncio import TimerHandle, Transport, get_running_loop
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from gateway.config.address import Address
from gateway.config.settings import ServerConfig
from gateway.request.routing import LiveConfig
from gateway.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

# Descriptors that no client may take: sockets, logs, databases and the admin socket's clients, and those of each
# worker (two ZeroMQ connections, a pipe, a descriptor of its process, and what starting it takes for a moment).
# libzmq ends the process when its accept finds none left.
FILES_OWN: Final = 128
FILES_PER_WORKER: Final = 8
WORKERS_COUNTED: Final = 16
# Of a large limit a larger part: nothing else has a use for it.
FILES_PART: Final = 16
# With fewer a daemon is of no use.
CLIENTS_MIN: Final = 64
# Inside of the reserve.
ADMIN_MAX: Final = 32

# Between two lines of the log that tell of refusals.
LOG_S: Final = 60.0
# Where a write deadline is switched off.
LOOK_S: Final = 15.0
LOOK_S_MIN: Final = 0.01
# About a millisecond.
LOOKS_A_TURN: Final = 1000

PUBLIC: Final = "public"
ADMIN: Final = "admin"


class TooFewFiles(Exception):
    """The limit of open files leaves too few for clients; the message says so, for a human."""


class LimitedConnection(Protocol):
    """As much of a connection as is needed to end it."""

    def give_way(self) -> None:
        """End now. It is idle."""
        ...

    def look(self) -> None:
        """End if the client takes nothing of what waits for it, at this look as at those before."""
        ...


class Opening(LimitedConnection, Protocol):
    """A TLS handshake: a connection that is another one when it is done."""

    def finish(self, transport: Transport) -> None:
        """Leave the place to the protocol of `transport`."""
        ...

    def unsent(self) -> int:
        """Bytes beneath TLS that the system has not taken."""
        ...


@dataclass(frozen=True, slots=True)
class Bounds:
    """Connections in all and of one address, and how long a client may take nothing of an answer (0: forever)."""

    total: int
    per_address: int
    write_timeout_s: float


@dataclass(slots=True)
class _Peer:
    """An address with a connection."""

    count: int = 0
    # Longest idle first.
    idle: dict[LimitedConnection, None] = field(default_factory=dict[LimitedConnection, None])


class Connections:
    """The connections of one listener, all on the event loop.

    When there is no room, the connection that has been idle for longest is closed for the new one: an idle client
    connects again when it has something to ask. A new one is refused only where every other has a request, and takes
    its answer.
    """

    def __init__(
        self,
        listener: str,
        bounds: Callable[[], Bounds],
        metrics: Metrics,
        is_shared: Callable[[str], bool] = lambda _: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`is_shared`: whether many clients have an address, which is then not counted by itself."""
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
        """Count a new connection, which is idle. False when there is no room for it."""
        bounds = self._bounds()
        most = bounds.total if self._is_shared(address) else bounds.per_address
        address = Address(address).network
        peer = self._peers.get(address)
        if peer is not None and peer.count >= most and not self._make_room(peer.idle):
            return self._refuse("address", f"{peer.count} connections of {address}")
        if len(self._open) >= bounds.total and not self._make_room(self._idle):
            return self._refuse("total", f"{len(self._open)} connections")
        # Making room may have removed the address.
        peer = self._peers.setdefault(address, _Peer())
        peer.count += 1
        self._open[connection] = address
        self.rest(connection)
        if self._timer is None:
            self._arm()
        return True

    def remove(self, connection: LimitedConnection) -> None:
        """It has ended, or was never admitted."""
        address = self._open.pop(connection, None)
        if address is None:
            return
        self._idle.pop(connection, None)
        peer = self._peers[address]
        peer.idle.pop(connection, None)
        peer.count -= 1
        if peer.count == 0:
            del self._peers[address]

    def work(self, connection: LimitedConnection) -> None:
        """It has a request: it does not give way."""
        if connection in self._idle:
            del self._idle[connection]
            del self._peers[self._open[connection]].idle[connection]

    def rest(self, connection: LimitedConnection) -> None:
        """It has no request, from now on."""
        address = self._open.get(connection)
        if address is not None:
            self._idle[connection] = self._peers[address].idle[connection] = None

    def dropped(self, reason: str) -> None:
        """A connection was ended by us for what its client did, or did not."""
        self._metrics.connections_dropped[reason] += 1

    def _make_room(self, idle: dict[LimitedConnection, None]) -> bool:
        oldest = next(iter(idle), None)
        if oldest is None:
            return False
        self.remove(oldest)
        self.dropped("idle")
        oldest.give_way()
        return True

    def _refuse(self, reason: str, text: str) -> bool:
        self._metrics.connections_refused[self._listener, reason] += 1
        if self._clock() - self._logged >= LOG_S:
            self._logged = self._clock()
            log.warning("connections to the %s socket are refused: %s, all with requests", self._listener, text)
        return False

    def _arm(self) -> None:
        wait_s = max(LOOK_S_MIN, self._bounds().write_timeout_s / 2 or LOOK_S)
        self._timer = get_running_loop().call_later(wait_s, self._look)

    def _look(self) -> None:
        # One timer for all of them.
        self._timer = None
        if self._open:
            self._look_at(list(self._open) if self._bounds().write_timeout_s else [])

    def _look_at(self, connections: list[LimitedConnection]) -> None:
        # A few in one turn of the loop: streams go on in between.
        for connection in connections[-LOOKS_A_TURN:]:
            if connection in self._open:
                connection.look()
        del connections[-LOOKS_A_TURN:]
        if connections:
            self._timer = get_running_loop().call_later(0, self._look_at, connections)
        else:
            self._arm()


def public_connections(live: LiveConfig, metrics: Metrics, files: int) -> Connections:
    """Those of the API, as configured, of a process that may have `files` open files. Raises `TooFewFiles`."""
    room = room_for_clients(files, len(live.config.models))
    if room < CLIENTS_MIN:
        raise TooFewFiles(
            f"at most {files} files may be open, and mlxd needs {files - room} for itself and its workers and "
            f"{CLIENTS_MIN} for clients: raise the limit, for example with ulimit -n 4096"
        )
    configured = live.config.server.max_connections
    if configured != "auto" and configured > room:
        log.warning("max_connections is %d, but the limit of %d open files leaves %d", configured, files, room)

    def bounds() -> Bounds:
        return _bounds(live.config.server, len(live.config.models), files)

    return Connections(PUBLIC, bounds, metrics, lambda address: live.proxies.trusts(address))


def admin_connections(live: LiveConfig, metrics: Metrics) -> Connections:
    """Those of the admin socket: few, and not counted by address, which they do not have."""
    return Connections(ADMIN, lambda: Bounds(ADMIN_MAX, ADMIN_MAX, live.config.server.write_timeout_s), metrics)


def room_for_clients(files: int, models: int) -> int:
    """Connections that a limit of open files leaves for clients."""
    return files - max(FILES_OWN + FILES_PER_WORKER * min(models, WORKERS_COUNTED), files // FILES_PART)


def _bounds(server: ServerConfig, models: int, files: int) -> Bounds:
    room = room_for_clients(files, models)
    total = room if server.max_connections == "auto" else min(room, server.max_connections)
    # One address cannot shut out all others.
    own = total // 2 if server.max_connections_per_address == "auto" else server.max_connections_per_address
    return Bounds(total, own, server.write_timeout_s)
