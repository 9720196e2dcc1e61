"""Sockets of the link: a ROUTER that sends to the workers, and a PULL that receives from them. A simulation replaces
them.
"""

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

import zmq

from protocol import sockets

# Frames above this size are sent without a copy.
COPY_BYTES_MAX: Final = 256 * 1024


class WorkerGone(Exception):
    """Raised when a worker cannot be reached. Nothing was sent, so a retry is safe."""


class Wire(Protocol):
    """Frames to and from workers. Frames of one worker arrive in their order."""

    @property
    def is_open(self) -> bool: ...
    def open(self) -> None:
        """Begin to receive frames."""
        ...

    def close(self) -> None:
        """Drop unsent frames, and receive none from now on."""
        ...

    def watch(self, read: Callable[[], None]) -> Callable[[], None]:
        """Call `read` when frames arrive. It must then receive until no frame is left. Return a function that ends
        this.
        """
        ...

    def receive(self) -> bytes | None:
        """Return a frame that has already arrived, or None."""
        ...

    def send(self, identity: bytes, frame: bytes) -> None:
        """Send a frame at once. Raises `WorkerGone` if the worker is not connected."""
        ...

    def drop_greetings(self) -> None:
        """Discard frames on the ROUTER. Each worker sends one there to make its identity routable."""
        ...


MakeWire = Callable[[str, str], Wire]


class ZmqWire:
    """Owner of the gateway's two ZeroMQ sockets, on one event loop."""

    def __init__(self, down: str, up: str) -> None:
        self._down, self._up = down, up
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._router: zmq.Socket[bytes] | None = None
        self._pull: zmq.Socket[bytes] | None = None

    @property
    def is_open(self) -> bool:
        return self._router is not None

    def open(self) -> None:
        """Bind both sockets. The run directory's lock must be held: stale socket files are replaced."""
        self._context = zmq.Context()
        self._router = sockets.bind_router(self._context, self._down)
        self._pull = sockets.bind_pull(self._context, self._up)

    def close(self) -> None:
        for socket in (self._router, self._pull):
            if socket is not None:
                socket.close(0)
        if self._context is not None:
            self._context.term()
        self._context = self._router = self._pull = None

    def watch(self, read: Callable[[], None]) -> Callable[[], None]:
        assert self._pull is not None, "open() comes first"
        loop = asyncio.get_running_loop()
        descriptor = self._pull.fileno()
        loop.add_reader(descriptor, read)

        def unwatch() -> None:
            loop.remove_reader(descriptor)

        return unwatch

    def receive(self) -> bytes | None:
        return None if self._pull is None else sockets.receive_now(self._pull)

    def send(self, identity: bytes, frame: bytes) -> None:
        if self._router is None:
            raise WorkerGone("the link is closed")
        try:
            self._router.send_multipart((identity, frame), zmq.NOBLOCK, copy=len(frame) < COPY_BYTES_MAX)
        except zmq.ZMQError as error:
            raise WorkerGone(f"{identity.decode()}: {error}") from error

    def drop_greetings(self) -> None:
        if self._router is not None:
            while sockets.receive_now(self._router) is not None:
                pass
