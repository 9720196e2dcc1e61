"""Transport of the link: reads the workers' frames in batches and sends them messages.

Sockets of the link: a ROUTER that sends to the workers, and a PULL that receives from them. A simulation replaces
them.

Connection of the link to one process of a worker.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import zmq

from gateway.link.sequence import Sequence
from protocol import sockets
from protocol.codec import MAX_FRAME_BYTES, FrameTooLarge, encode
from protocol.failures import Failure
from protocol.from_worker import AdaptersSet, Drained, Goodbye, Hello, Loading, Pong, Ready
from protocol.stats import Stats
from protocol.to_worker import Down, Generate, Shutdown

log = logging.getLogger(__name__)

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


@dataclass(frozen=True, slots=True)
class SendFailed:
    """Report: a request could not be sent to the worker of this epoch, because the worker is gone or its
    queue is full.
    """

    epoch: int


@dataclass(frozen=True, slots=True)
class SequenceProgressed:
    """Report: a watched sequence of this epoch has its first token or has ended."""

    epoch: int


# Messages that a worker sends about itself, and what the link observes about the worker.
Report = Hello | Loading | Ready | Pong | Drained | Goodbye | AdaptersSet | SendFailed | SequenceProgressed


@dataclass(slots=True, eq=False)
class Connection:
    """State of one attached epoch. It can still be read after the epoch is detached. Only the link writes it.

    `post` puts a report into the supervisor's queue, and `park` receives each sequence that the worker has lost.
    Neither calls the link.
    """

    name: str
    epoch: int
    post: Callable[[Report], None]
    park: Callable[[Sequence], None]
    stats: Stats | None = None
    # True once a request could not be sent. No more requests are then submitted to this epoch.
    is_unreachable: bool = False
    # True once the worker was sent a Drain with a deadline, or a Shutdown. Sequences that it ends afterwards are not
    # resumed.
    is_ending: bool = False
    # Rids of aborted sequences whose end the worker has not confirmed. A number that keeps growing means that the
    # worker is stuck.
    unacked_aborts: set[int] = field(default_factory=set[int])


class Runner(Protocol):
    """Destination of requests: a worker."""

    @property
    def name(self) -> str: ...
    @property
    def epoch(self) -> int: ...
    @property
    def is_ready(self) -> bool:
        """Whether the runner takes new requests."""
        ...

    def refusal(self, request: Generate) -> Failure | None:
        """Return the reason to refuse a request, or None."""
        ...


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
        log.warning("refused worker %s#%d (pid %d): not the expected process", hello.worker, hello.epoch, hello.pid)
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
