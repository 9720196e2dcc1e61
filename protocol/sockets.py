"""The four sockets, and the only place that sets a ZeroMQ option.

The gateway binds a ROUTER (down) and a PULL (up); each worker connects a DEALER and a PUSH. The DEALER sends one empty
frame, which makes its identity routable; everything else a worker says goes over PUSH and is totally ordered.
Flow control is by admission, so high-water marks are off. A socket belongs to the thread that made it.
"""

import os
import sys
from pathlib import Path
from typing import Any, Final

import zmq

from protocol.codec import MAX_FRAME_BYTES

# `sun_path` holds 108 bytes on Linux and 104 on macOS, each with its terminator.
IPC_PATH_MAX: Final = 107 if sys.platform == "linux" else 103
# Long enough for the last message of an exiting worker to leave.
GOODBYE_LINGER_MS: Final = 2000
# A worker without a gateway looks up this often from a send that cannot proceed.
SEND_TIMEOUT_MS: Final = 500


class PathTooLong(ValueError):
    """The run directory makes a socket path that the system cannot bind."""


def addresses(run_dir: Path) -> tuple[str, str]:
    """The (down, up) addresses below `run_dir`. Raises `PathTooLong`."""
    down, up = run_dir / "d.sock", run_dir / "u.sock"
    for path in (down, up):
        check_path(path)
    return f"ipc://{down}", f"ipc://{up}"


def check_path(path: Path) -> None:
    """Raises `PathTooLong`."""
    if len(os.fsencode(path)) > IPC_PATH_MAX:
        raise PathTooLong(f"{path} is longer than {IPC_PATH_MAX} bytes; set MLXD_HOME to a shorter folder")


def bind_router(context: zmq.Context[Any], address: str) -> Any:
    socket = _make(context, zmq.ROUTER)
    # A send to a worker that is gone raises EHOSTUNREACH instead of vanishing.
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.bind(address)
    return socket


def bind_pull(context: zmq.Context[Any], address: str) -> Any:
    socket = _make(context, zmq.PULL)
    socket.bind(address)
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


def receive_now(socket: "zmq.Socket[bytes]") -> bytes | None:
    """A frame that is there already, or None."""
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
