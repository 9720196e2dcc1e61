"""The loop of a model that reads: order, aborts, deadlines, drains, failures, and one end for each job."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protocol.checkpoint import EMBED
from protocol.failures import Code, Failure
from protocol.from_worker import Accepted, Delta, Drained, EmbeddingInfo, Finish, Progress, Rejected, Step, Up
from protocol.spec import WorkerSpec
from protocol.to_worker import BATCH_PRIORITY, Abort, Drain, SetMemory, Shutdown
from tests.support import threads
from tests.support.scale import patient
from worker.embedding.intake_and_loop import JobLoop, take_group
from worker.embedding.load_model import EmbeddingInput, EmbeddingJob, EmbeddingModel, Numbers
from worker.engine.gauges import Gauges
from worker.errors import StepFailed
from worker.turn_loop import LoopCommand

SPEC = WorkerSpec("m", "", 1, "", "", max_running=2, max_waiting=3)


def vectors(items: Sequence[EmbeddingInput]) -> Numbers:
    """The length of an item and its first id."""
    return np.array([[len(item.ids), item.ids[0] + 1] for item in items], np.float32)


class Harness:
    """A loop on a thread of its own, around a function in place of a model."""

    def __init__(self, compute: Callable[[Sequence[EmbeddingInput]], Numbers] = vectors) -> None:
        self.gauges = Gauges()
        self.sent: list[Up] = []
        self.passes: list[list[int]] = []
        self.error: Exception | None = None
        self._changed = threading.Condition()

        def computed(items: Sequence[EmbeddingInput]) -> Numbers:
            self.passes.append([item.ids[0] for item in items])
            return compute(items)

        reader = EmbeddingModel(EMBED, None, Path(), "bert", 1000, 512, 0, computed, embedding=EmbeddingInfo(2))
        self.loop = JobLoop(reader, SPEC, self._take, self.gauges)
        self.loop.warm_up()
        self.passes.clear()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.loop.inbox.put(Shutdown())
        threads.join(self._thread)

    def _run(self) -> None:
        try:
            self.loop.run()
        except Exception as error:
            self.error = error
            self.loop.fail_all(Failure(Code.INTERNAL, repr(error)))

    def _take(self, message: Up) -> None:
        with self._changed:
            self.sent.append(message)
            self._changed.notify_all()

    def end(self, rid: int) -> Delta:
        """The one delta of a job."""
        deadline = time.monotonic() + patient(10)
        with self._changed:
            while not (ends := [delta for delta in self.deltas() if delta.rid == rid]):
                assert self._changed.wait(deadline - time.monotonic()), self.sent
        assert len(ends) == 1
        return ends[0]

    def deltas(self) -> list[Delta]:
        return [delta for message in self.sent if isinstance(message, Step) for delta in message.deltas]

    def expect(self, kind: type[Up]) -> Up:
        deadline = time.monotonic() + patient(10)
        with self._changed:
            while not (seen := [message for message in self.sent if isinstance(message, kind)]):
                assert self._changed.wait(deadline - time.monotonic()), self.sent
        return seen[0]


@contextmanager
def running(
    compute: Callable[[Sequence[EmbeddingInput]], Numbers] = vectors, *first: EmbeddingJob | LoopCommand
) -> Iterator[Harness]:
    """A loop that finds these commands when it begins."""
    harness = Harness(compute)
    for command in first:
        harness.loop.inbox.put(command)
    harness.start()
    try:
        yield harness
    finally:
        harness.stop()


def job(rid: int, *lengths: int, **settings: Any) -> EmbeddingJob:
    items = [EmbeddingInput((rid * 10 + at,) * length) for at, length in enumerate(lengths)]
    return EmbeddingJob(rid=rid, items=items, arrived=time.monotonic(), **settings)


def rows(delta: Delta) -> list[list[float]]:
    return np.frombuffer(delta.data, "<f4").reshape(-1, 2).tolist()


def test_a_job_is_accepted_and_answered_in_the_order_of_its_inputs() -> None:
    with running(vectors, job(1, 3, 300, 30, wants_progress=True)) as harness:
        end = harness.end(1)
    assert rows(end) == [[3, 11], [300, 12], [30, 13]]
    assert end.finish is Finish.STOP
    assert end.usage is not None
    assert (end.usage.prompt, end.usage.completion) == (333, 0)
    assert harness.expect(Accepted) == Accepted(1, 333)
    progress = [message for message in harness.sent if isinstance(message, Progress)]
    assert [message.processed for message in progress] == [300, 330, 333]
    assert harness.gauges.prompt_tokens == 333


def test_inputs_of_nearly_one_length_of_all_jobs_share_a_pass() -> None:
    with running(vectors, job(1, 100, 20), job(2, 95, 50), job(3, 89, 21)) as harness:
        for rid in (1, 2, 3):
            harness.end(rid)
    assert harness.passes[0] == [10, 20, 30]
    assert sorted(len(each) for each in harness.passes) == [1, 1, 1, 3]


def test_a_group_has_no_more_tokens_than_a_pass_takes_but_one_item_at_least() -> None:
    jobs = [job(1, 100, 100, 100), job(2, 100)]
    assert [(place.job.rid, place.at) for place in take_group(jobs, 250)] == [(1, 0), (1, 1)]
    assert [(place.job.rid, place.at) for place in take_group(jobs, 10)] == [(1, 2)]


def test_tenants_take_turns_and_priority_goes_first() -> None:
    many = job(1, *(10 * at for at in range(30, 20, -1)), tenant="a")
    urgent = job(3, 5, tenant="a", priority=-1)
    with running(vectors, many, job(2, 7, tenant="b"), urgent) as harness:
        for rid in (1, 2, 3):
            harness.end(rid)
    assert harness.passes[0] == [30]
    assert [20] in harness.passes[1:3]


def test_jobs_of_batches_share_no_pass_with_others_and_come_after_them() -> None:
    batch = [job(rid, 100, priority=BATCH_PRIORITY) for rid in (1, 2)]
    with running(vectors, *batch, job(3, 100), job(4, 20)) as harness:
        for rid in range(1, 5):
            harness.end(rid)
    assert sorted(harness.passes[:2]) == [[30], [40]]
    assert harness.passes[2:] == [[10, 20]]


def test_jobs_of_batches_fill_no_queue() -> None:
    batch = [job(rid, 5, priority=BATCH_PRIORITY) for rid in range(1, 4)]
    with running(vectors, *batch, *(job(rid, 5) for rid in range(4, 9))) as harness:
        assert {harness.end(rid).finish for rid in range(1, 9)} == {Finish.STOP}


def test_an_abort_ends_a_job_also_when_it_comes_first() -> None:
    with running(vectors, Abort((1,)), job(1, 5), job(2, 5)) as harness:
        assert harness.end(1).finish is Finish.ABORT
        assert harness.end(2).finish is Finish.STOP


def test_a_deadline_that_has_passed_ends_a_job() -> None:
    with running(vectors, job(1, 5, deadline=time.monotonic() - 1)) as harness:
        failure = harness.end(1).failure
    assert failure is not None
    assert failure.code is Code.DEADLINE_EXCEEDED


def test_a_drain_lets_what_runs_end_and_refuses_what_comes() -> None:
    with running(vectors, job(1, 5), Drain(patient(5)), job(2, 5)) as harness:
        assert harness.end(1).finish is Finish.STOP
        assert harness.expect(Drained) == Drained(1, 0)
        refused = harness.expect(Rejected)
    assert isinstance(refused, Rejected)
    assert (refused.rid, refused.failure.code) == (2, Code.DRAINING)


def test_more_jobs_than_may_wait_are_refused() -> None:
    with running(vectors, *(job(rid, 5) for rid in range(1, 7))) as harness:
        refused = harness.expect(Rejected)
        assert isinstance(refused, Rejected)
        assert (refused.rid, refused.failure.code) == (6, Code.BUSY)


@pytest.mark.parametrize("bad", [[np.nan, 1.0], [np.inf, 1.0], [0.0, 0.0]])
def test_a_vector_that_is_not_finite_or_null_is_an_error_of_its_job_alone(bad: list[float]) -> None:
    def compute(items: Sequence[EmbeddingInput]) -> Numbers:
        return np.array([bad if item.ids[0] == 21 else [1, 2] for item in items], np.float32)

    with running(compute, job(1, 9, 9), job(2, 9, 9)) as harness:
        failure = harness.end(2).failure
        assert harness.end(1).finish is Finish.STOP
    assert failure is not None
    assert failure.code is Code.ROW_FAILED
    assert harness.end(2).data == b""
    # It was computed once more without the others.
    assert harness.passes[-1] == [21]


def test_what_only_a_batch_spoils_is_computed_alone() -> None:
    def compute(items: Sequence[EmbeddingInput]) -> Numbers:
        return vectors(items) if len(items) == 1 else np.full((len(items), 2), np.nan, np.float32)

    with running(compute, job(1, 9, 9)) as harness:
        assert rows(harness.end(1)) == [[9, 11], [9, 12]]


def test_memory_that_runs_out_makes_passes_smaller_and_loses_nothing() -> None:
    def compute(items: Sequence[EmbeddingInput]) -> Numbers:
        if len(items) > 2:
            raise MemoryError
        return vectors(items)

    with running(compute, job(1, *[9] * 8)) as harness:
        assert rows(harness.end(1)) == [[9, 11 + at] for at in range(8)]
    assert harness.gauges.allocation_failures >= 1


def test_an_input_that_fails_alone_is_the_end_of_its_job_alone() -> None:
    def compute(items: Sequence[EmbeddingInput]) -> Numbers:
        if any(item.ids[0] == 11 for item in items):
            raise ValueError("no")
        return vectors(items)

    with running(compute, job(1, 9, 9), job(2, 9)) as harness:
        failure = harness.end(1).failure
        assert harness.end(2).finish is Finish.STOP
    assert failure is not None
    assert failure.code is Code.ROW_FAILED


def test_a_fault_of_the_device_ends_the_loop() -> None:
    def compute(items: Sequence[EmbeddingInput]) -> Numbers:
        if len(items[0].ids) == 9:
            raise RuntimeError("[METAL] Command buffer execution failed")
        return vectors(items)

    harness = Harness(compute)
    harness.loop.inbox.put(job(1, 9))
    harness.start()
    assert harness.end(1).finish is Finish.ERROR
    harness.stop()
    assert isinstance(harness.error, StepFailed)


def test_vectors_are_cut_to_length_one() -> None:
    with running(
        lambda items: np.array([[3.0, 4.0, 12.0]] * len(items), np.float32), job(1, 5, dimensions=2)
    ) as harness:
        assert rows(harness.end(1))[0] == pytest.approx([0.6, 0.8])


def test_another_share_of_memory_is_kept_while_jobs_run() -> None:
    with running(vectors, SetMemory(1 << 32), job(1, 5)) as harness:
        harness.end(1)
    assert harness.gauges.granted_bytes == 1 << 32
