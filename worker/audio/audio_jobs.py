"""Audio jobs, their loop, the queue of clips that wait to be decoded, and the memory for their samples.

Memory for the samples of clips, while they are decoded and until their jobs end.

Audio jobs: a job is one request to transcribe or to speak, from intake to its end.

Queue of clips that wait to be decoded: by priority, within the memory for samples, and until their deadlines.

Loop of an audio model: each turn transcribes a window or speaks a few sentences.

One request is computed at a time. Requests take turns, so a long clip delays another request by one window.
"""

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Final

from protocol.failures import Code, Failure
from protocol.from_worker import (
    MAX_CLIP_BYTES,
    MIN_CLIP_BYTES,
    SPOKEN_TOKENS_PER_S,
    Delta,
    Finish,
    Rejected,
    Step,
    Up,
    Usage,
)
from protocol.spec import DEFAULT_MAX_RUNNING, WorkerSpec
from protocol.to_worker import Abort, Drain, Shutdown
from worker.audio.audio_model import AudioModel
from worker.engine.gauges import Gauges
from worker.errors import RequestInvalid
from worker.model import memory
from worker.turn_loop import QueuedJob, TurnLoop
from worker.vision.sounds import Reserve

log = logging.getLogger("mlxd.worker")

# A forward pass is assumed to need at least this much memory.
_MIN_PASS_BYTES: Final = 64 << 20
# A forward pass is assumed to need the size of the weights divided by this number. See PASS_BYTES in
# gateway/workers/memory/estimate.py.
_PASS_WEIGHTS_DIVISOR: Final = 8


def bytes_for_clips(memory_bytes: int, weights: int, host: int, buffers: int) -> int:
    """Return the bytes of a memory share that remain for samples; `host` is the memory of Python and libraries."""
    left = memory_bytes - weights - host - buffers - max(_MIN_PASS_BYTES, weights // _PASS_WEIGHTS_DIVISOR)
    return max(MIN_CLIP_BYTES, left)


class SampleMemory:
    """Bytes of samples by tenant, safe for all threads.

    All clips together have `most_bytes`; a larger clip may be admitted alone, up to `alone_bytes`.
    """

    def __init__(self, most_bytes: int = MAX_CLIP_BYTES, alone_bytes: float = math.inf) -> None:
        self._most = most_bytes
        self.alone_bytes = alone_bytes
        self._held: Counter[str] = Counter()
        # Condition whose lock guards the counts, and on which threads that need memory wait.
        self.changed = threading.Condition()

    def resize(self, most_bytes: int, alone_bytes: float) -> None:
        """Change the limits; clips may already hold more than the new limits."""
        with self.changed:
            self._most, self.alone_bytes = most_bytes, alone_bytes
            self.changed.notify_all()

    def fits(self, size_bytes: int, own_bytes: int = 0) -> bool:
        """Return whether `size_bytes` are within the limits; `own_bytes` of them are already held."""
        with self.changed:
            others = self._held.total() - own_bytes
            return others + size_bytes <= self._most if others else size_bytes <= self.alone_bytes

    def take(self, tenant: str, size_bytes: int) -> None:
        with self.changed:
            self._held[tenant] += size_bytes

    def give_back(self, tenant: str, size_bytes: int) -> None:
        with self.changed:
            self._held[tenant] -= size_bytes
            if not self._held[tenant]:
                del self._held[tenant]
            self.changed.notify_all()

    def held(self, tenant: str) -> int:
        """Return the bytes that one tenant holds."""
        return self._held[tenant]

    @property
    def total(self) -> int:
        """Return the bytes that all tenants hold."""
        with self.changed:
            return self._held.total()


@dataclass(frozen=True, slots=True)
class AudioPiece:
    """Part of an answer, with the fields of a `Delta`. After a piece with `ends_turn`, another request may have its
    turn.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    data: bytes = b""
    ends_turn: bool = True


@dataclass(slots=True, eq=False, kw_only=True)
class AudioJob(QueuedJob):
    """Transcription or speech request. `work` computes the next piece on demand.

    `heard_s` is the length of a transcribed clip, 0 for speech.
    """

    work: Generator[AudioPiece]
    input_tokens: int
    heard_s: float = 0.0
    # Bytes of samples that the job holds until it ends.
    sample_bytes: int = 0
    # Number of tokens that the client has from an earlier worker; they are computed again, but not sent.
    already_sent: int = 0
    output_tokens: int = 0

    @property
    def tokens(self) -> int:
        return self.input_tokens

    def usage(self, now: float) -> Usage:
        admitted = self.admitted or now
        return Usage(
            prompt=self.input_tokens,
            cached=0,
            completion=self.output_tokens,
            queue_ms=(admitted - self.arrived) * 1e3,
            decode_ms=(now - admitted) * 1e3,
            audio_tokens=self.input_tokens if self.heard_s else 0,
        )


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


class AudioCut(Exception):
    """Raised when the request that is being computed has ended, or when the loop must end."""


class AudioLoop(TurnLoop[AudioJob]):
    """Loop of one loaded model. When a job ends, the job's bytes in `room` are released."""

    def __init__(
        self,
        model: AudioModel,
        spec: WorkerSpec,
        send: Callable[[Up], None],
        gauges: Gauges,
        room: SampleMemory,
    ) -> None:
        super().__init__(spec, model.weights_bytes, send, gauges)
        self._model = model
        self._room = room
        # Job that is being computed.
        self._job: AudioJob | None = None

    def _compute_once(self) -> None:
        self._model.compute_once()

    def _apply(self, limits: memory.AllocationLimits) -> None:
        """Apply the limits of the memory share. The part of it that clips may use shrinks under memory pressure."""
        super()._apply(limits)
        order = self._grant.order
        if not order.memory_bytes:
            return
        host = max(0, memory.measure().host - self._room.total)
        alone = bytes_for_clips(order.memory_bytes, self._model.weights_bytes, host, limits.buffers)
        most = min(MAX_CLIP_BYTES, alone)
        self._room.resize(max(MIN_CLIP_BYTES, int(most * order.kv_part)), alone)

    def check(self) -> None:
        """Handle commands that arrive during a turn. Raises `AudioCut` if they have ended the request."""
        self._handle_waiting()
        self._enforce_deadlines()
        self._gauges.busy_since = time.monotonic()
        if self._is_stopping or self._job is None or self._job.rid not in self._requests:
            raise AudioCut

    def _take_turn(self) -> None:
        job = self._job = self._in_turn()[0]
        began = time.monotonic()
        job.admitted = job.admitted or began
        self._gauges.running, self._gauges.waiting = 1, len(self._requests) - 1
        try:
            self._compute(job)
        except AudioCut:
            pass
        except RequestInvalid as error:
            self._fail(job, error.failure)
        except Exception as error:  # code of any architecture may raise any exception
            self._survive(error)
            log.warning("request %d failed: %r", job.rid, error)
            self._fail(job, Failure(Code.ROW_FAILED, "the request failed while it was computed", repr(error)))
        finally:
            self._job = None
            self._gauges.audio_s += time.monotonic() - began
            self._gauges.step_seq += 1

    def _compute(self, job: AudioJob) -> None:
        """Compute all pieces of one turn."""
        for piece in job.work:
            self._pass_on(job, piece)
            if piece.ends_turn:
                return
            self._flush()
            self.check()
        self._gauges.heard_s += job.heard_s
        self._finish(job, Finish.STOP)

    def _pass_on(self, job: AudioJob, piece: AudioPiece) -> None:
        count = len(piece.token_ids)
        job.output_tokens += count
        if job.already_sent > 0:
            job.already_sent -= count
            return
        self._gauges.generation_tokens += count
        if not job.heard_s:
            self._gauges.spoken_s += count / SPOKEN_TOKENS_PER_S
        if piece.text or piece.data:
            self._outbox.add(Delta(job.rid, text=piece.text, token_ids=piece.token_ids, data=piece.data))

    def _enqueue(self, request: AudioJob) -> None:
        super()._enqueue(request)
        if self._requests.get(request.rid) is not request:
            self._let_go(request)

    def _ending(self, job: AudioJob, finish: Finish, failure: Failure | None) -> Delta:
        self._let_go(job)
        return super()._ending(job, finish, failure)

    def _let_go(self, job: AudioJob) -> None:
        """Free the job's resources. If the job is being computed, `AudioCut` ends its computation."""
        self._room.give_back(job.tenant, job.sample_bytes)
        job.sample_bytes = 0
        if job is not self._job:
            job.work.close()
