"""The gateway's two sockets: frames to workers by their identity, and frames from workers in batches."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

import zmq

from gateway.link.worker_connection import Connection
from protocol import sockets
from protocol.codec import MAX_FRAME_BYTES, FrameTooLarge, encode
from protocol.from_worker import Hello
from protocol.to_worker import Down, Generate, Shutdown

log = logging.getLogger(__name__)

# Deltas handled before other tasks get a turn.
BATCH_DELTAS: Final = 128
# A frame beyond this is not copied: libzmq sends it from where it is.
LARGE_BYTES: Final = 256 * 1024
# A worker that is refused is told so within this many tries; its sockets connect one after the other.
DISMISSALS: Final = 100
DISMISS_RETRY_S: Final = 0.1


class WorkerGone(Exception):
    """The worker could not be reached. Nothing was sent: another attempt is safe."""


class Transport:
    """Owns a ROUTER to the workers and a PULL from them; everything here runs on one loop.

    `handle` takes a frame and returns how much work it was, in deltas; `settle` follows all frames that were there.
    Frames for a connection that has a carrier go by that, and not by the ROUTER.
    """

    def __init__(self, run_dir: Path, handle: Callable[[bytes], int], settle: Callable[[], None]) -> None:
        """Raises `PathTooLong`."""
        self.down, self.up = sockets.addresses(run_dir)
        self._handle = handle
        self._settle = settle
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._router: zmq.Socket[bytes] | None = None
        self._pull: zmq.Socket[bytes] | None = None
        # Ends `run`.
        self._broken: asyncio.Future[None] | None = None

    def open(self) -> None:
        """Bind both sockets. The run directory's lock must be held: stale socket files are replaced."""
        self._context = zmq.Context()
        self._router = sockets.bind_router(self._context, self.down)
        self._pull = sockets.bind_pull(self._context, self.up)

    def close(self) -> None:
        """Close the sockets at once. What was not sent is dropped."""
        for socket in (self._router, self._pull):
            if socket is not None:
                socket.close(0)
        if self._context is not None:
            self._context.term()
        self._context = self._router = self._pull = None

    # -- from workers ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Read until cancelled. Raises what reading raised."""
        assert self._pull is not None, "open() comes first"
        loop = asyncio.get_running_loop()
        descriptor = self._pull.fileno()
        self._broken = loop.create_future()
        loop.add_reader(descriptor, self._read)
        try:
            # The descriptor tells only of what comes from now on.
            self._read()
            await self._broken
        finally:
            loop.remove_reader(descriptor)
            self._broken = None

    def _read(self) -> None:
        """Everything that is there, in batches. A callback, not a task: it is cheaper, and every token comes this way.

        It always reads until there is nothing left, or comes back: the descriptor wakes us only once for what is there.
        """
        broken, pull = self._broken, self._pull
        if broken is None or broken.done() or pull is None:
            return
        deltas = 0
        try:
            while deltas < BATCH_DELTAS and (frame := sockets.receive_now(pull)) is not None:
                deltas += self._handle(frame)
            if deltas >= BATCH_DELTAS:
                asyncio.get_running_loop().call_soon(self._read)
            self._settle()
        except Exception as error:  # the root of the callback: `run` raises it
            broken.set_exception(error)

    def drop_greetings(self) -> None:
        """Discard what came up the ROUTER: a DEALER's first frame only makes it routable, and no other ever comes."""
        if self._router is not None:
            while sockets.receive_now(self._router) is not None:
                pass

    # -- to workers --------------------------------------------------------------------------------------------------

    def send(self, connection: Connection, message: Down) -> None:
        """Send at once. Raises `WorkerGone` when the worker is not connected, and `Unsendable`."""
        self.send_frame(connection, encode(message))

    def try_send(self, connection: Connection, message: Down) -> None:
        """Send where the worker is connected: one that is gone is noticed elsewhere."""
        with contextlib.suppress(WorkerGone):
            self.send(connection, message)

    def send_frame(self, connection: Connection, frame: bytes) -> None:
        """Send a message that is encoded already. Raises `WorkerGone`."""
        if connection.carrier is not None:
            connection.carrier.carry(frame)
        else:
            self._post(connection.name, connection.epoch, frame)

    def dismiss(self, hello: Hello, is_wanted: Callable[[Hello], bool]) -> None:
        """End a worker that was not started here: it holds memory that is not counted."""
        log.warning("refused worker %s#%d (pid %d): not an expected incarnation", hello.worker, hello.epoch, hello.pid)
        self._dismiss(hello, is_wanted, DISMISSALS)

    def _dismiss(self, hello: Hello, is_wanted: Callable[[Hello], bool], tries: int) -> None:
        if self._router is None or is_wanted(hello):
            return
        try:
            self._post(hello.worker, hello.epoch, encode(Shutdown("not one that is wanted")))
        except WorkerGone:
            # Its Hello came before its other socket was connected.
            if tries > 1:
                asyncio.get_running_loop().call_later(DISMISS_RETRY_S, self._dismiss, hello, is_wanted, tries - 1)

    def _post(self, name: str, epoch: int, frame: bytes) -> None:
        if self._router is None:
            raise WorkerGone("the link is closed")
        try:
            identity = f"{name}#{epoch}".encode()
            self._router.send_multipart((identity, frame), zmq.NOBLOCK, copy=len(frame) < LARGE_BYTES)
        except zmq.ZMQError as error:
            raise WorkerGone(f"{name}#{epoch}: {error}") from error


def frames_of(requests: list[Generate]) -> list[bytes]:
    """The frames of one request's sequences. Together they are no larger than one may be: libzmq queues all of them.

    Raises `Unsendable`.
    """
    frames: list[bytes] = []
    size = 0
    for request in requests:
        frames.append(encode(request))
        size += len(frames[-1])
        if size > MAX_FRAME_BYTES:
            raise FrameTooLarge(size)
    return frames
