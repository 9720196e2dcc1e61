"""Queue of clips that wait to be decoded: by priority, within the memory for samples, and until their deadlines."""

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Final

from protocol.failures import Code, Failure
from protocol.from_worker import Delta, Finish, Rejected, Step, Up
from protocol.spec import DEFAULT_MAX_RUNNING, WorkerSpec
from protocol.to_worker import Abort, Drain, Shutdown
from worker.audio.audio_job import AudioJob
from worker.audio.sample_memory import SampleMemory
from worker.engine.gauges import Gauges
from worker.errors import RequestInvalid
from worker.vision.sounds import Reserve

# Number of decoder threads: with two, a long clip does not delay a short one.
_DECODER_THREADS: Final = 2
# Maximum number of clips that may overtake a clip which does not fit into memory yet.
_MAX_TIMES_OVERTAKEN: Final = 32
# A clip that outgrows its reservation waits for at least this many times the reservation.
_RESERVATION_GROWTH: Final = 2
_MEMORY_FULL: Final = Failure(Code.BUSY, "the clips of other requests fill the memory for clips; try again")
_QUEUE_FULL: Final = Failure(Code.BUSY, "the model's queue is full; try again")
_DEADLINE_PASSED: Final = Failure(Code.DEADLINE_EXCEEDED, "the request's deadline has passed")
_STOPPING: Final = Failure(Code.DRAINING, "the model is being stopped; try again")


class _NoRoom(Exception):
    """Raised when the clip that is being decoded needs more memory than is free."""


class _RequestEnded(Exception):
    """Raised when the request of the clip that is being decoded has ended."""


@dataclass(slots=True, eq=False)
class PendingClip:
    """Transcription request whose clip is not decoded yet. Owned by the queue; `ends` is a time of the monotonic clock.

    `decode` makes the request's job, within the memory that it reserves.
    """

    rid: int
    priority: int
    tenant: str
    ends: float
    decode: Callable[[Reserve], AudioJob]
    # Known size of the clip's samples in bytes.
    needed: int = 0
    # Bytes that are reserved for the samples.
    reserved: int = 0
    passed: int = 0
    number: int = 0
    is_ended: bool = False


class ClipQueue:
    """Queue in front of a loop's inbox: clips wait here until they are decoded, and commands for them are handled here.

    `put` never blocks, and may be called from any thread. Every clip becomes a job in the inbox, or ends here, exactly
    once.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        inbox: "SimpleQueue[Any]",
        room: SampleMemory,
        send: Callable[[Up], None],
        gauges: Gauges,
        refusing: Callable[[int], AbstractContextManager[None]],
    ) -> None:
        """`refusing(rid)` returns a context manager that turns any error inside it into a `Rejected` of `rid`."""
        self._spec = spec
        self._inbox = inbox
        self._room = room
        self._send = send
        self._gauges = gauges
        self._refusing = refusing
        # The fields below are guarded by the room's lock.
        self._waiting: dict[int, PendingClip] = {}
        self._decoding: dict[int, PendingClip] = {}
        self._numbers = 0

    def start(self) -> None:
        for number in range(_DECODER_THREADS):
            threading.Thread(target=self._run, name=f"decoder-{number}", daemon=True).start()

    def put(self, command: Any) -> None:
        """Queue a clip, or pass other commands on to the loop."""
        match command:
            case PendingClip():
                self._take_in(command)
                return
            case Abort(rids=rids):
                command = Abort(tuple(self._abort(rids)), command.reason)
            case Drain() | Shutdown():
                self._refuse_all()
            case _:
                pass
        self._inbox.put(command)

    # -- commands ----------------------------------------------------------------------------------------------------

    def _take_in(self, clip: PendingClip) -> None:
        with self._room.changed:
            if len(self._waiting) >= (self._spec.max_running or DEFAULT_MAX_RUNNING) + self._spec.max_waiting:
                self._send(Rejected(clip.rid, _QUEUE_FULL))
                return
            self._numbers += 1
            clip.number = self._numbers
            self._waiting[clip.rid] = clip
            self._count()
            self._room.changed.notify_all()

    def _abort(self, rids: Iterable[int]) -> list[int]:
        """End clips whose clients have disconnected. Return the rids that do not belong to clips."""
        others: list[int] = []
        with self._room.changed:
            for rid in rids:
                clip = self._waiting.get(rid) or self._decoding.get(rid)
                if clip is None or clip.is_ended:
                    others.append(rid)
                else:
                    self._end(clip, None)
        return others

    def _refuse_all(self) -> None:
        with self._room.changed:
            for clip in (*self._waiting.values(), *self._decoding.values()):
                if not clip.is_ended:
                    self._end(clip, _STOPPING)

    def _expire(self) -> None:
        """End clips that waited too long or no longer fit into memory, and clips whose decoding takes too long."""
        now, most = time.monotonic(), self._room.alone_bytes
        for clip in [each for each in self._waiting.values() if now >= each.ends]:
            self._end(clip, _MEMORY_FULL)
        for clip in [each for each in self._waiting.values() if each.needed > most]:
            self._end(clip, _too_large(clip.needed, int(most)).failure)
        for clip in self._decoding.values():
            if now >= clip.ends and not clip.is_ended:
                self._end(clip, _DEADLINE_PASSED)

    def _end(self, clip: PendingClip, failure: Failure | None) -> None:
        """Send the terminal event of a clip that becomes no job: an abort, or the clip's failure."""
        clip.is_ended = True
        if self._waiting.pop(clip.rid, None) is not None:
            self._count()
            self._room.changed.notify_all()
        if failure is not None:
            self._send(Rejected(clip.rid, failure))
        else:
            self._send(Step(self._spec.epoch, self._gauges.step_seq, [Delta(clip.rid, finish=Finish.ABORT)]))

    def _count(self) -> None:
        self._gauges.undecoded = len(self._waiting)

    # -- decoding ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            clip = self._next()
            with self._refusing(clip.rid):
                self._decode(clip)
            del clip  # this frees the clip's large file; the next clip may arrive much later

    def _next(self) -> PendingClip:
        """Wait for a clip that fits into memory, reserve its bytes and return it."""
        changed = self._room.changed
        with changed:
            while True:
                self._expire()
                clip = self._first_fitting()
                if clip is not None:
                    del self._waiting[clip.rid]
                    self._decoding[clip.rid] = clip
                    self._count()
                    clip.reserved = clip.needed
                    self._room.take(clip.tenant, clip.reserved)
                    return clip
                ends = min((each.ends for each in self._waiting.values()), default=None)
                changed.wait(None if ends is None else max(0.0, ends - time.monotonic()))

    def _first_fitting(self) -> PendingClip | None:
        """Return the first clip that fits into memory: by priority, then by least memory held by its tenant, then by
        arrival.
        """

        def order(clip: PendingClip) -> tuple[int, int, int]:
            return clip.priority, self._room.held(clip.tenant), clip.number

        before: list[PendingClip] = []
        for clip in sorted(self._waiting.values(), key=order):
            if self._room.fits(clip.needed):
                for each in before:
                    each.passed += 1
                return clip
            if clip.passed >= _MAX_TIMES_OVERTAKEN:
                return None
            before.append(clip)
        return None

    def _decode(self, clip: PendingClip) -> None:
        job: AudioJob | None = None
        is_short = False
        try:
            job = clip.decode(lambda size: self._reserve(clip, size))
        except _NoRoom:
            is_short = True
        except _RequestEnded:
            pass
        except BaseException:  # the request has ended, so its error is not needed
            if not clip.is_ended:
                raise
        finally:
            self._leave(clip, job, is_short=is_short)

    def _leave(self, clip: PendingClip, job: AudioJob | None, *, is_short: bool) -> None:
        """Finish a decoding: the job goes to the loop, or the clip waits for memory again."""
        with self._room.changed:
            del self._decoding[clip.rid]
            reserved, clip.reserved = clip.reserved, 0
            if job is not None and not clip.is_ended:
                reserved -= job.sample_bytes
                self._inbox.put(job)
            elif is_short and not clip.is_ended:
                self._waiting[clip.rid] = clip
                self._count()
            self._room.give_back(clip.tenant, reserved)

    def _reserve(self, clip: PendingClip, size_bytes: int) -> None:
        """Reserve memory for a clip's samples. Raises `RequestInvalid` if the clip needs more than the model's limit,
        and `_RequestEnded`.

        Raises `_NoRoom` if other clips hold the memory; decoding then restarts when enough is free.
        """
        with self._room.changed:
            self._expire()
            if clip.is_ended:
                raise _RequestEnded
            if size_bytes <= clip.reserved:
                return
            if size_bytes > self._room.alone_bytes:
                raise _too_large(size_bytes, int(self._room.alone_bytes))
            if not self._room.fits(size_bytes, clip.reserved):
                likely = max(size_bytes, _RESERVATION_GROWTH * clip.reserved) if clip.reserved else size_bytes
                clip.needed = int(min(likely, self._room.alone_bytes))
                raise _NoRoom
            self._room.take(clip.tenant, size_bytes - clip.reserved)
            clip.reserved = size_bytes


def _too_large(size_bytes: int, most_bytes: int) -> RequestInvalid:
    message = f"The clip has {size_bytes >> 20} MiB of samples; the model's memory has room for {most_bytes >> 20} MiB."
    return RequestInvalid(Code.INVALID_AUDIO, message, param="file")
