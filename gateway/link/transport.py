"""Transport of the link: reads the workers' frames in batches and sends them messages."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

from gateway.link.wire import MakeWire, WorkerGone
from gateway.link.worker_connection import Connection
from protocol import sockets
from protocol.codec import MAX_FRAME_BYTES, FrameTooLarge, encode
from protocol.from_worker import Hello
from protocol.to_worker import Down, Generate, Shutdown

log = logging.getLogger(__name__)

# Number of deltas after which other tasks of the event loop get a turn.
BATCH_DELTAS: Final = 128
DISMISS_ATTEMPTS: Final = 100
DISMISS_RETRY_S: Final = 0.1


class Transport:
    """Reader and sender of messages on the gateway's wire, on one event loop.

    `handle` processes a frame and returns how many deltas it counts as. `end_batch` is called when no frame is left to
    read, or after `BATCH_DELTAS`.
    """

    def __init__(
        self, run_dir: Path, handle: Callable[[bytes], int], end_batch: Callable[[], None], make_wire: MakeWire
    ) -> None:
        """Prepare the wire in `run_dir`. Raises `PathTooLong`."""
        self.down, self.up = sockets.addresses(run_dir)
        self._handle = handle
        self._end_batch = end_batch
        self._wire = make_wire(self.down, self.up)
        self._failure: asyncio.Future[None] | None = None

    def open(self) -> None:
        """Bind both sockets. The run directory's lock must be held: stale socket files are replaced."""
        self._wire.open()

    def close(self) -> None:
        """Close the sockets immediately. Unsent frames are dropped."""
        self._wire.close()

    # -- from workers ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Read until cancelled. Raises the exception of a failed read."""
        self._failure = asyncio.get_running_loop().create_future()
        unwatch = self._wire.watch(self._read)
        try:
            # Frames that have already arrived are read now, because ZeroMQ's descriptor does not signal them.
            self._read()
            await self._failure
        finally:
            unwatch()
            self._failure = None

    def _read(self) -> None:
        """Read all pending frames, in batches. This is a callback, because a task is too slow for every token.

        ZeroMQ's descriptor is edge-triggered, so this must read until no frame is left, or schedule itself.
        """
        failure, wire = self._failure, self._wire
        if failure is None or failure.done() or not wire.is_open:
            return
        deltas = 0
        try:
            while deltas < BATCH_DELTAS and (frame := wire.receive()) is not None:
                deltas += self._handle(frame)
            if deltas >= BATCH_DELTAS:
                asyncio.get_running_loop().call_soon(self._read)
            self._end_batch()
        except Exception as error:  # `run` raises the exception, because a callback cannot.
            failure.set_exception(error)

    def drop_greetings(self) -> None:
        """Discard frames on the ROUTER. Each worker sends one there to make its identity routable."""
        self._wire.drop_greetings()

    # -- to workers --------------------------------------------------------------------------------------------------

    def send(self, connection: Connection, message: Down) -> None:
        """Send a message immediately. Raises `WorkerGone` if the worker is not connected, and `Unsendable`."""
        self.send_encoded(connection, encode(message))

    def try_send(self, connection: Connection, message: Down) -> None:
        """Send if the worker is connected. A lost worker is detected by its exit or its heartbeat."""
        with contextlib.suppress(WorkerGone):
            self.send(connection, message)

    def send_encoded(self, connection: Connection, frame: bytes) -> None:
        """Send a message of which `frame` is the encoding. Raises `WorkerGone`."""
        self._post(connection.name, connection.epoch, frame)

    def dismiss(self, hello: Hello, is_wanted: Callable[[Hello], bool]) -> None:
        """Shut down a worker that this gateway did not start, because its memory is not counted.

        Its Hello may arrive before its connection to the ROUTER, so sending is retried.
        """
        log.warning("refused worker %s#%d (pid %d): not an expected incarnation", hello.worker, hello.epoch, hello.pid)
        self._dismiss(hello, is_wanted, DISMISS_ATTEMPTS)

    def _dismiss(self, hello: Hello, is_wanted: Callable[[Hello], bool], attempts: int) -> None:
        if not self._wire.is_open or is_wanted(hello):
            return
        try:
            self._post(hello.worker, hello.epoch, encode(Shutdown("not one that is wanted")))
        except WorkerGone:
            if attempts > 1:
                asyncio.get_running_loop().call_later(DISMISS_RETRY_S, self._dismiss, hello, is_wanted, attempts - 1)

    def _post(self, name: str, epoch: int, frame: bytes) -> None:
        self._wire.send(f"{name}#{epoch}".encode(), frame)


def frames_of(requests: list[Generate]) -> list[bytes]:
    """Encode the sequences of one request. libzmq queues all frames, so their total size is limited to one frame's
    maximum.

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
