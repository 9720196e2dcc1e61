"""Frames of a worker's messages. A message that cannot be sent ends its request, never the worker."""

import logging
from collections.abc import Callable, Iterator
from typing import Any, Final, cast

import msgspec
from msgspec import structs

from protocol import codec
from protocol.failures import Code, Failure
from protocol.from_worker import Delta, Finish, Rejected, Step, Tokenized, Up
from protocol.to_worker import Abort
from worker.engine.gauges import Gauges
from worker.output.encodable import encodable

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
