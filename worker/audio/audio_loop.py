"""Loop of an audio model: each turn transcribes a window or speaks a few sentences.

One request is computed at a time. Requests take turns, so a long clip delays another request by one window.
"""

import logging
import time
from collections.abc import Callable

from protocol.failures import Code, Failure
from protocol.from_worker import Delta, Finish, Up
from protocol.spec import WorkerSpec
from protocol.transcript import MAX_CLIP_BYTES, MIN_CLIP_BYTES, SPOKEN_TOKENS_PER_S
from worker.audio.audio_job import AudioJob, AudioPiece
from worker.audio.audio_model import AudioModel
from worker.audio.sample_memory import SampleMemory, bytes_for_clips
from worker.engine.gauges import Gauges
from worker.errors import RequestInvalid
from worker.jobs.turn_loop import TurnLoop
from worker.model import memory

log = logging.getLogger("mlxd.worker")


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

    def _apply(self, limits: memory.ShareLimits) -> None:
        """Apply the limits of the memory share. The part of it that clips may use shrinks under memory pressure."""
        super()._apply(limits)
        order = self._share.order
        if not order.share_bytes:
            return
        host = max(0, memory.measure().host - self._room.total)
        alone = bytes_for_clips(order.share_bytes, self._model.weights_bytes, host, limits.buffers)
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
        if job.left_out > 0:
            job.left_out -= count
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
