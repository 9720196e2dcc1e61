"""ZeroMQ sockets, and the only place that sets their options.

The gateway binds a ROUTER (down) and a PULL (up); each worker connects a DEALER and a PUSH. The DEALER sends one empty
frame, which makes its identity routable; all other messages of a worker use PUSH and are totally ordered. Flow control
is by admission, so high-water marks are off. A socket belongs to the thread that made it.

Sockets between ranks of a group use TCP with CURVE, for encryption and authentication, and have a high-water mark.
"""

import os
import re
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Final

import msgspec
import zmq
from zmq.utils import z85

from protocol.codec import MAX_FRAME_BYTES

# `sun_path` holds 108 bytes on Linux and 104 on macOS, including the terminator.
IPC_PATH_MAX: Final = 107 if sys.platform == "linux" else 103
# The linger time suffices to send the last message of an exiting worker.
GOODBYE_LINGER_MS: Final = 2000
# Interval after which a worker's blocked send returns to check for its gateway.
SEND_TIMEOUT_MS: Final = 500
# These options are for sockets to other machines. The heartbeat timeout is libzmq's own. It is longer than any of
# mlxd's timeouts, because a busy machine must not look like a closed connection.
HANDSHAKE_MS: Final = 5000
HEARTBEAT_MS: Final = 1000
HEARTBEAT_TIMEOUT_MS: Final = 60_000
RECONNECT_MS: Final = 100
RECONNECT_MAX_MS: Final = 2000
REMOTE_FRAMES: Final = 1000
# Maximum number of events that wait for one subscriber.
EVENT_FRAMES: Final = 10_000
# A key in the form that mlxd stores and sends.
_KEY: Final = re.compile(r"[0-9a-f]{64}")


class KeyPair(msgspec.Struct, frozen=True):
    """CURVE key pair, each key as 64 hexadecimal digits. The secret key alone authenticates a rank."""

    public: str
    secret: str

    def __repr__(self) -> str:
        # The secret key must not appear in logs and tracebacks.
        return f"KeyPair(public={self.public!r})"


def make_pair() -> KeyPair:
    """Generate a key pair from the system's random numbers."""
    public, secret = zmq.curve_keypair()
    return KeyPair(z85.decode(public).hex(), z85.decode(secret).hex())


def encoded(key: str) -> bytes:
    """Return a key in the form that libzmq takes. Raises `ValueError`."""
    if _KEY.fullmatch(key) is None:
        raise ValueError("a key is 64 hexadecimal digits")
    return z85.encode(bytes.fromhex(key))


class AllowedKeys:
    """Public keys that may connect, checked by ZAP at each handshake."""

    def __init__(self, keys: Callable[[], Collection[str]], on_refusal: Callable[[str], None]) -> None:
        self._keys = keys
        self._on_refusal = on_refusal

    def callback(self, domain: str, key: bytes) -> bool:
        """Check a key. pyzmq's authenticators require this method name."""
        public = z85.decode(key).hex()
        is_admitted = public in self._keys()
        if not is_admitted:
            self._on_refusal(public)
        return is_admitted


class PathTooLong(ValueError):
    """Raised when the run directory makes a socket path that is too long for the system."""


def addresses(run_dir: Path) -> tuple[str, str]:
    """Return the (down, up) addresses below `run_dir`. Raises `PathTooLong`."""
    down, up = run_dir / "d.sock", run_dir / "u.sock"
    for path in (down, up):
        check_path(path)
    return f"ipc://{down}", f"ipc://{up}"


def check_path(path: Path) -> None:
    """Check the length of a socket path. Raises `PathTooLong`."""
    if len(os.fsencode(path)) > IPC_PATH_MAX:
        raise PathTooLong(f"{path} is longer than {IPC_PATH_MAX} bytes; set MLXD_HOME to a shorter folder")


def bind_router(context: zmq.Context[Any], address: str) -> Any:
    socket = _make(context, zmq.ROUTER)
    # A send to a worker that is gone raises EHOSTUNREACH instead of being dropped silently.
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.bind(address)
    return socket


def bind_pull(context: zmq.Context[Any], address: str) -> Any:
    socket = _make(context, zmq.PULL)
    socket.bind(address)
    return socket


def bind_events(context: zmq.Context[Any], address: str) -> Any:
    """Bind a PUB socket; events beyond the queue of a slow subscriber are dropped. Raises `ZMQError`."""
    return _bind_bounded(context, zmq.PUB, address)


def bind_replays(context: zmq.Context[Any], address: str) -> Any:
    """Bind a ROUTER socket that replays missed events. Raises `ZMQError`."""
    return _bind_bounded(context, zmq.ROUTER, address)


def _bind_bounded(context: zmq.Context[Any], kind: int, address: str) -> Any:
    socket = context.socket(kind)
    socket.set_hwm(EVENT_FRAMES)
    try:
        socket.bind(address)
    except zmq.ZMQError:
        socket.close(0)
        raise
    return socket


def connect_dealer(context: zmq.Context[Any], address: str, identity: bytes) -> Any:
    socket = _make(context, zmq.DEALER)
    socket.setsockopt(zmq.ROUTING_ID, identity)
    socket.connect(address)
    return socket


def connect_push(context: zmq.Context[Any], address: str) -> Any:
    socket = _make(context, zmq.PUSH)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.LINGER, GOODBYE_LINGER_MS)
    socket.setsockopt(zmq.SNDTIMEO, SEND_TIMEOUT_MS)
    socket.connect(address)
    return socket


def bind_secure_router(context: zmq.Context[Any], address: str, own: KeyPair) -> Any:
    """Bind a ROUTER for other machines. An authenticator of the context must check the keys of its clients."""
    socket = _make_remote(context, zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, encoded(own.secret))
    socket.bind(address)
    return socket


def connect_secure_dealer(
    context: zmq.Context[Any],
    address: str,
    identity: bytes,
    server_public: str,
    own: KeyPair,
) -> Any:
    """Connect a DEALER to a ROUTER that must have the key `server_public`."""
    socket = _make_remote(context, zmq.DEALER)
    socket.setsockopt(zmq.ROUTING_ID, identity)
    # Messages queued for a closed connection must not be sent on the next one.
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.CURVE_SERVERKEY, encoded(server_public))
    socket.setsockopt(zmq.CURVE_PUBLICKEY, encoded(own.public))
    socket.setsockopt(zmq.CURVE_SECRETKEY, encoded(own.secret))
    socket.connect(address)
    return socket


def receive_now(socket: "zmq.Socket[bytes]") -> bytes | None:
    """Return a frame that has already arrived, or None."""
    try:
        return socket.recv(zmq.NOBLOCK)
    except zmq.Again:
        return None


def _make(context: zmq.Context[Any], kind: int) -> Any:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    return socket


def _make_remote(context: zmq.Context[Any], kind: int) -> Any:
    socket = _make(context, kind)
    socket.setsockopt(zmq.SNDHWM, REMOTE_FRAMES)
    socket.setsockopt(zmq.RCVHWM, REMOTE_FRAMES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
    return socket
