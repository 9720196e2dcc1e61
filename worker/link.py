"""Link of a worker to the gateway: a thread that receives messages, and a thread that sends them.

Frames of a worker's messages. A message that cannot be sent ends its request, never the worker.
"""

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from queue import SimpleQueue
from typing import Any, Final, assert_never, cast

import msgspec
import zmq
from msgspec import structs
from msgspec.structs import replace

from protocol import PROTOCOL, __version__, codec, sockets
from protocol.failures import Code, ExitStatus, Failure
from protocol.from_worker import AdaptersSet, Delta, Drained, Finish, Hello, Pong, Ready, Rejected, Step, Tokenized, Up
from protocol.spec import WorkerSpec
from protocol.to_worker import (
    Abort,
    Detokenize,
    Down,
    Drain,
    Dump,
    Explain,
    Generate,
    Ping,
    SetAdapters,
    SetLogLevel,
    SetMemory,
    SetPace,
    Shutdown,
    Tokenize,
    Welcome,
)
from worker.engine.gauges import Gauges
from worker.output.stops import encodable

log = logging.getLogger("mlxd.worker")

_TOO_LARGE: Final = Failure(Code.INVALID_REQUEST, "the answer is too large to be sent; ask for less at once")


class MessageEncoder:
    """Encoder of messages, owned by the sending thread.

    Half a surrogate pair becomes a question mark. A message of more than `limit` bytes is an error of its requests: a
    step is split, an answer becomes `Rejected`, and a sequence gets an ERROR delta as its end and is stopped by
    `abort`.
    """

    def __init__(self, gauges: Gauges, abort: Callable[[Abort], None], limit: int = codec.MAX_FRAME_BYTES) -> None:
        self._gauges = gauges
        self._abort = abort
        self._limit = limit
        # Rids of sequences that the encoder has ended and the engine has not ended yet.
        self._ended: set[int] = set()

    def encode(self, message: Up) -> Iterator[bytes]:
        """Yield the frames of a message, in order."""
        if self._ended and isinstance(message, Step):
            message = self._without_ended(message)
        frame = self._encode(message)
        if frame is not None:
            yield frame
            return
        match message:
            case Step(deltas=[_, _, *_] as deltas):
                middle = len(deltas) // 2
                yield from self.encode(structs.replace(message, deltas=deltas[:middle], stats=None))
                yield from self.encode(structs.replace(message, deltas=deltas[middle:]))
            case Step(deltas=[delta]):
                yield codec.encode(structs.replace(message, deltas=[self._end(delta)]))
            case Tokenized(rid) | Rejected(rid):
                yield codec.encode(Rejected(rid, _TOO_LARGE))
            case _:
                log.error("the message belongs to no request and was dropped")

    def _encode(self, message: Up) -> bytes | None:
        """Return the frame of a message, with repaired text if necessary; None if it cannot be sent."""
        try:
            try:
                frame = codec.encode(message)
            except codec.FrameTooLarge:
                raise
            except codec.Unsendable as error:
                self._note(message, error)
                frame = codec.encode(_readable(message))
            if len(frame) > self._limit:
                raise codec.FrameTooLarge(len(frame))
        except codec.Unsendable as error:
            self._note(message, error)
            return None
        return frame

    def _end(self, delta: Delta) -> Delta:
        """Return the last delta of a sequence whose output cannot be sent."""
        if delta.finish is None:
            self._ended.add(delta.rid)
            self._abort(Abort((delta.rid,), "too large"))
        return Delta(delta.rid, finish=Finish.ERROR, usage=delta.usage, failure=_TOO_LARGE)

    def _without_ended(self, step: Step) -> Step:
        deltas = [delta for delta in step.deltas if delta.rid not in self._ended]
        self._ended -= {delta.rid for delta in step.deltas if delta.finish is not None}
        return step if len(deltas) == len(step.deltas) else structs.replace(step, deltas=deltas)

    def _note(self, message: Up, error: codec.Unsendable) -> None:
        self._gauges.repaired_messages += 1
        log.warning("a %s could not be sent unchanged: %s", type(message).__name__, error)


def _readable(message: Up) -> Up:
    fields = msgspec.to_builtins(message, builtin_types=(bytes,))
    return msgspec.convert(_encodable(fields), Up, builtin_types=(bytes,))


def _encodable(value: Any) -> Any:
    match value:
        case str():
            return encodable(value)
        case list() | tuple():
            return [_encodable(item) for item in cast(list[Any], value)]
        case dict():
            return {_encodable(key): _encodable(item) for key, item in cast(dict[Any, Any], value).items()}
        case _:
            return value


_POLL_MS: Final = 250

ClientRequest = Generate | Tokenize | Detokenize | Explain
Control = Abort | Drain | Shutdown | SetMemory | SetPace | SetAdapters


class GatewayLink:
    """Link that is open from before the model is loaded until after it is freed.

    The receiving thread calls `on_control` with commands for the engine, and `on_request` with new requests.
    """

    def __init__(self, spec: WorkerSpec, gauges: Gauges) -> None:
        self._spec = spec
        self._gauges = gauges
        self._context = zmq.Context()
        self._outbox: SimpleQueue[Up | None] = SimpleQueue()
        self._frames = MessageEncoder(gauges, lambda abort: self.on_control(abort))
        self._is_closing = threading.Event()
        # Whether the worker was ordered to end.
        self.is_stopped = False
        self._ready: Ready | None = None
        # Identifier of the gateway process to which this worker has sent its state.
        self._boot: int | None = None
        self.on_request: Callable[[ClientRequest], None] = self._reject_loading
        self.on_control: Callable[[Control], None] = self._control_while_loading
        self._threads = [
            threading.Thread(target=self._guarded, args=(body,), name=name, daemon=True)
            for name, body in (("rx", self._receive), ("tx", self._transmit))
        ]

    def start(self) -> None:
        self.send(self._hello())
        for thread in self._threads:
            thread.start()

    def send(self, message: Up) -> None:
        """Queue a message; never blocks."""
        self._outbox.put(message)

    def announce_ready(self, ready: Ready) -> None:
        self._ready = ready
        self.send(ready)

    def announce_adapters(self, change: AdaptersSet) -> None:
        """Send the changed adapters to the gateway; a later gateway gets them in `Ready`."""
        if self._ready is not None:
            self._ready = replace(self._ready, adapters=change.adapters, weights_bytes=change.weights_bytes)
        self.send(change)

    def stop(self, order: Shutdown) -> None:
        self.is_stopped = True
        self.on_control(order)

    def close(self) -> None:
        """Send the queued messages, then stop both threads."""
        self._is_closing.set()
        self._outbox.put(None)
        for thread in self._threads:
            thread.join(timeout=5.0)
        self._context.term()

    # -- receiving ---------------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        socket = sockets.connect_dealer(self._context, self._spec.down, self._spec.identity)
        socket.send(b"")  # this frame makes the identity routable
        received_at = time.monotonic()
        is_orphan = False
        while not self._is_closing.is_set():
            if not socket.poll(_POLL_MS):
                silence_s = time.monotonic() - received_at
                if silence_s > self._spec.orphan_grace_s and not is_orphan:
                    log.warning("no gateway for %.0f s: aborting all requests", silence_s)
                    is_orphan = True
                    self.on_control(Drain(0.0))
                if silence_s > self._spec.orphan_max_s:
                    log.warning("no gateway for %.0f s: leaving", silence_s)
                    self.stop(Shutdown("orphaned"))
                    break
                continue
            received_at, is_orphan = time.monotonic(), False
            try:
                self._dispatch(codec.decode_down(socket.recv()))
            except codec.RefusedRequest as error:
                self.send(Rejected(error.rid, Failure(Code.INVALID_REQUEST, str(error), param=error.param)))
            except codec.MalformedFrame as error:
                log.warning("dropped a malformed frame: %s", error)
        socket.close()

    def _dispatch(self, message: Down) -> None:
        match message:
            case Ping():
                self.send(Pong(message.seq, message.t_ns, self._gauges.snapshot()))
            case Generate() | Tokenize() | Detokenize() | Explain():
                self.on_request(message)
            case Shutdown():
                self.stop(message)
            case Abort() | Drain() | SetMemory() | SetPace() | SetAdapters():
                self.on_control(message)
            case SetLogLevel(level):
                self._set_level(level)
            case Dump():
                faulthandler.dump_traceback(sys.stderr, all_threads=True)
            case Welcome(boot=boot):
                # The first gateway to answer may not be the one that started this worker.
                if boot != self._boot:
                    self._boot = boot
                    self._introduce()
            case _:
                assert_never(message)

    def _set_level(self, level: str) -> None:
        if level.upper() in logging.getLevelNamesMapping():
            log.setLevel(level.upper())
        else:
            log.warning("unknown log level %r", level)

    def _introduce(self) -> None:
        """Send this worker's state to a gateway that has not received it."""
        self.send(self._hello())
        if self._ready is not None:
            self.send(self._ready)

    def _hello(self) -> Hello:
        spec = self._spec
        mlx_version, state = ("", "loading") if self._ready is None else (version("mlx"), "ready")
        return Hello(spec.name, spec.epoch, os.getpid(), PROTOCOL, 0, __version__, mlx_version, state)

    def _reject_loading(self, request: ClientRequest) -> None:
        self.send(Rejected(request.rid, Failure(Code.BUSY, "the model is still loading; try again")))

    def _control_while_loading(self, message: Control) -> None:
        match message:
            case Shutdown():
                os._exit(ExitStatus.OK)  # the main thread may be in native code, so the process ends here
            case Drain():
                self.send(Drained(self._spec.epoch, 0))  # no request has been accepted yet
            case Abort() | SetMemory() | SetPace() | SetAdapters():
                pass  # the gateway sends these messages again once the worker is ready

    # -- sending -----------------------------------------------------------------------------------------------------

    def _transmit(self) -> None:
        socket = sockets.connect_push(self._context, self._spec.up)
        while (message := self._outbox.get()) is not None:
            for frame in self._frames.encode(message):
                while not _try_send(socket, frame):
                    if self._is_closing.is_set():  # the gateway reads no more messages
                        socket.close(linger=0)
                        return
        socket.close()

    def _guarded(self, body: Callable[[], None]) -> None:
        try:
            body()
        except Exception:  # the process cannot go on without its IO threads
            log.exception("an IO thread failed")
            os._exit(ExitStatus.INTERNAL)


def _try_send(socket: "zmq.Socket[bytes]", frame: bytes) -> bool:
    try:
        socket.send(frame)
    except zmq.Again:
        return False
    return True
