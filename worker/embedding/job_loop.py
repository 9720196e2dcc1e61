"""Loop of an embedding model: it takes jobs, runs one forward pass after another, and sends one answer for each job."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

import numpy as np
from msgspec.structs import replace

from protocol.failures import Code, Failure
from protocol.from_worker import Delta, Finish, Progress, Up
from protocol.spec import WorkerSpec
from worker.embedding.job import EmbeddingInput, EmbeddingJob, Numbers
from worker.embedding.load_model import EmbeddingModel
from worker.engine.gauges import Gauges
from worker.jobs.turn_loop import TurnLoop
from worker.model import memory

log = logging.getLogger("mlxd.worker")

# Maximum tokens of one forward pass, with padding. A higher limit gains nothing on a CPU, and an abort waits for the
# pass.
_GPU_PASS_TOKENS: Final = 16_384
CPU_PASS_TOKENS: Final = 2_048
_MIN_PASS_TOKENS: Final = 256
# A failed allocation halves the tokens of a pass; they double again after each interval of this length.
_REGROW_INTERVAL_S: Final = 300.0
_WARM_UP_TOKENS: Final = 16
# Maximum padding of a row in a pass, as a fraction of the longest row.
_MAX_PADDING_FRACTION: Final = 0.12
_NOT_FINITE: Final = Failure(
    Code.ROW_FAILED, "the model gave no number for one of the inputs: its vector is not finite, or null"
)


@dataclass(frozen=True, slots=True)
class ResultPlace:
    """Place of a result: its job, and the index of its item."""

    job: EmbeddingJob
    at: int

    @property
    def item(self) -> EmbeddingInput:
        return self.job.items[self.at]


class JobLoop(TurnLoop[EmbeddingJob]):
    """Loop of jobs for one loaded model."""

    def __init__(self, model: EmbeddingModel, spec: WorkerSpec, send: Callable[[Up], None], gauges: Gauges) -> None:
        super().__init__(spec, model.weights_bytes, send, gauges)
        self._model = model
        self._most_tokens = _GPU_PASS_TOKENS if memory.has_gpu() else CPU_PASS_TOKENS
        self._tokens = self._most_tokens
        self._relaxes_at = 0.0

    def _compute_once(self) -> None:
        item = EmbeddingInput(
            tuple(at % self._model.vocab_size for at in range(min(_WARM_UP_TOKENS, self._model.max_context)))
        )
        self._model.compute([item])

    # -- one pass ----------------------------------------------------------------------------------------------------

    def _take_turn(self) -> None:
        """Run one forward pass for the job whose turn it is, with items of similar length from other jobs."""
        now = time.monotonic()
        if self._tokens < self._most_tokens and now >= self._relaxes_at:
            self._tokens, self._relaxes_at = self._tokens * 2, now + _REGROW_INTERVAL_S
        group = take_group(self._in_turn(), self._tokens)
        for place in group:
            place.job.admitted = place.job.admitted or now
        running = len({place.job.rid for place in group})
        self._gauges.running, self._gauges.waiting = running, len(self._requests) - running
        self._compute(group)
        self._gauges.step_seq += 1

    def _compute(self, group: Sequence[ResultPlace]) -> None:
        try:
            rows = self._model.compute([place.item for place in group])
        except Exception as error:  # code of any architecture may raise any exception
            self._recover(group, error)
        else:
            self._store(group, rows)

    def _store(self, group: Sequence[ResultPlace], rows: Numbers) -> None:
        sound = [bool(np.isfinite(row).all()) for row in rows]
        if self._model.embedding is not None:
            sound = [is_sound and bool(row.any()) for is_sound, row in zip(sound, rows, strict=True)]
        tokens = 0
        for place, row, is_sound in zip(group, rows, sound, strict=True):
            if place.job.rid not in self._requests:
                continue
            if not is_sound and len(group) > 1:
                # The item is computed again alone, so that the other items cannot be the cause.
                self._compute([place])
                continue
            if not is_sound:
                log.error("request %d: input %d has no finite vector", place.job.rid, place.at)
                self._fail(place.job, _NOT_FINITE)
                continue
            place.job.store(place.at, row)
            tokens += len(place.item.ids)
        self._gauges.prompt_tokens += tokens
        for job in {place.job.rid: place.job for place in group}.values():
            if job.rid not in self._requests:
                continue
            if job.wants_progress:
                self._outbox.send(Progress(job.rid, job.computed_tokens, job.tokens))
            if job.is_computed:
                self._finish(job, Finish.STOP)

    def _recover(self, group: Sequence[ResultPlace], error: Exception) -> None:
        """Compute the group again in smaller parts. If a group of one item fails, the job of that item ends."""
        if self._survive(error):
            self._tokens = max(_MIN_PASS_TOKENS, self._tokens // 2)
            self._relaxes_at = time.monotonic() + _REGROW_INTERVAL_S
        log.warning("a pass of %d inputs failed: %s", len(group), error)
        if len(group) > 1:
            middle = len(group) // 2
            self._compute(group[:middle])
            self._compute(group[middle:])
            return
        self._fail(
            group[0].job, Failure(Code.ROW_FAILED, "the request failed while an input was computed", repr(error))
        )

    def _ending(self, job: EmbeddingJob, finish: Finish, failure: Failure | None) -> Delta:
        return replace(super()._ending(job, finish, failure), data=job.data() if finish is Finish.STOP else b"")


def take_group(jobs: Sequence[EmbeddingJob], tokens: int) -> list[ResultPlace]:
    """Take the longest item of the first job, and items of all jobs, in job order, that are nearly as long.

    A group has up to `tokens` tokens including padding, and at least one item.
    """
    longest = len(jobs[0].items[jobs[0].left[0]].ids)
    room = max(1, tokens // longest)
    group: list[ResultPlace] = []
    for job in jobs:
        chosen = list(islice(_fitting(job, longest), room - len(group)))
        group += [ResultPlace(job, at) for at in chosen]
        taken = set(chosen)
        job.left = [at for at in job.left if at not in taken]
        if len(group) >= room:
            break
    return group


def _fitting(job: EmbeddingJob, longest: int) -> Iterator[int]:
    least = longest * (1 - _MAX_PADDING_FRACTION)
    return (at for at in job.left if least <= len(job.items[at].ids) <= longest)
