"""WorkerHandle failures, with real processes behind a real pool and link."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.link.collector import Collector
from gateway.link.parked_sequences import REFUSED, ResumeLimits
from gateway.link.transport import WorkerGone
from gateway.workers.supervisor.state import ModelUnavailable, State, WorkerLimits
from gateway.workers.supervisor.worker import WorkerHandle
from protocol.failures import Code
from protocol.from_worker import Delta, Finish, Usage
from tests.support.pool import Running, config, finish_of, read_all, short_home, text_of, tokens, until
from tests.support.scale import patient, scaled

pytestmark = pytest.mark.anyio


def quick() -> WorkerLimits:
    """Limits that are short enough for a test, in the proportions of the real ones."""
    return WorkerLimits(
        heartbeat_s=0.05,
        pong_s=patient(0.5),
        step_s=patient(0.4),
        dump_s=patient(0.05),
        abort_s=patient(0.3),
        suspect_s=patient(0.3),
        term_s=patient(0.2),
        grace_s=patient(0.5),
    )


@pytest.fixture
def home() -> Iterator[Path]:
    with short_home() as path:
        yield path


async def test_tokens_arrive_in_order_and_end_once(home: Path) -> None:
    async with Running(config(home)) as running:
        deltas = await running.complete(max_tokens=40)
        assert text_of(deltas) == tokens(40)
        assert [t for d in deltas for t in d.token_ids] == list(range(40))
        assert finish_of(deltas) is Finish.LENGTH
        assert running.link.in_flight == 0


@pytest.mark.soak
async def test_streams_of_a_killed_worker_go_on_at_its_successor_and_others_do_not_notice(home: Path) -> None:
    async with Running(config(home, ("a", "b"))) as running:
        doomed = await running.ready("a")
        streams = [running.generate(doomed, max_tokens=400) for _ in range(3)]
        neighbour = running.generate(await running.ready("b"), max_tokens=60)
        begun = [await stream.read_deltas() for stream in streams]
        os.kill(doomed.pid, signal.SIGKILL)
        for start, stream in zip(begun, streams, strict=True):
            deltas = start + await read_all(stream)
            assert text_of(deltas) == tokens(400)
            assert [t for d in deltas for t in d.token_ids] == list(range(400))
            assert finish_of(deltas) is Finish.LENGTH
            assert deltas[-1].usage == Usage(3, 0, 400)
        assert text_of(await read_all(neighbour)) == tokens(60)
        assert running.events.exits == [-9]
        assert (doomed.restart_policy.restarts, running.events.resumes) == (1, 3)
        assert running.link.in_flight == 0


@pytest.mark.soak
async def test_a_stream_outlives_one_worker_after_another(home: Path) -> None:
    async with Running(config(home)) as running:
        worker = await running.ready()
        stream = running.generate(worker, max_tokens=200)
        deltas: list[Delta] = []
        for _ in range(3):
            until_count = len([t for d in deltas for t in d.token_ids]) + 20
            while len([t for d in deltas for t in d.token_ids]) < until_count:
                deltas += await stream.read_deltas()
            os.kill(worker.pid, signal.SIGKILL)
        assert text_of(deltas + await read_all(stream)) == tokens(200)


async def test_what_was_lost_before_it_was_accepted_is_sent_again(home: Path) -> None:
    async with Running(config(home)) as running:
        worker = await running.ready()
        os.kill(worker.pid, signal.SIGSTOP)
        streams = [running.generate(worker, max_tokens=5) for _ in range(3)]
        os.kill(worker.pid, signal.SIGKILL)
        assert [text_of(await read_all(stream)) for stream in streams] == [tokens(5)] * 3


@pytest.mark.soak
async def test_a_restart_on_request_loses_no_stream(home: Path) -> None:
    async with Running(config(home)) as running:
        worker = await running.ready()
        streams = [running.generate(worker, max_tokens=100) for _ in range(16)]
        begun = [await stream.read_deltas() for stream in streams]
        await running.pool.restart("m")
        for start, stream in zip(begun, streams, strict=True):
            assert text_of(start + await read_all(stream)) == tokens(100)
        assert (worker.epoch, worker.restart_policy.restarts, running.events.exits) == (2, 0, [0])


async def test_a_fault_in_the_loop_fails_nobody(home: Path) -> None:
    async with Running(config(home)) as running:
        worker = await running.ready()
        innocent = running.generate(worker, max_tokens=100)
        await innocent.read_deltas()
        deltas = await running.complete(text="exit 70", max_tokens=1000)
        # The same request did it again at the successor.
        assert deltas[-1].failure is not None
        assert deltas[-1].failure.code is Code.QUARANTINED
        assert running.events.exits == [70, 70]
        assert finish_of(await read_all(innocent)) is Finish.LENGTH
        assert text_of(await running.complete()) == tokens(5)


async def test_a_request_that_kills_workers_is_refused_and_the_others_complete(home: Path) -> None:
    async with Running(config(home)) as running:
        worker = await running.ready()
        streams = [running.generate(worker, max_tokens=150) for _ in range(4)]
        for stream in streams:
            await stream.read_deltas()
        poison = running.generate(worker, text="kill")
        assert (await read_all(poison))[-1].failure == REFUSED
        for stream in streams:
            assert finish_of(await read_all(stream)) is Finish.LENGTH
        epoch = worker.epoch
        again = await running.complete(text="kill")
        assert again[-1].failure == REFUSED
        assert worker.epoch == epoch == 3
        assert running.events.quarantines == 1


@pytest.mark.parametrize("fault", [*scaled(["deaf"], []), "stuck"])
async def test_a_hung_worker_is_ended_and_what_else_it_ran_goes_on(home: Path, fault: str) -> None:
    async with Running(config(home), limits=quick()) as running:
        innocent = running.generate(await running.ready(), max_tokens=50)
        begun = await innocent.read_deltas()
        deltas = await running.complete(text=fault, max_tokens=1000)
        assert deltas[-1].failure == REFUSED
        assert text_of(begun + await read_all(innocent)) == tokens(50)
        assert running.events.stuck_workers == 2
        assert running.events.exits[0] in (-signal.SIGABRT, -signal.SIGKILL)


async def test_a_hung_load_wakes_every_waiter_with_the_reason(home: Path) -> None:
    async with Running(config(home), "--hang-on-load", limits=replace(quick(), load_s=0.5)) as running:
        waits = await asyncio.gather(*(running.pool.ensure_ready("m") for _ in range(3)), return_exceptions=True)
        assert all(isinstance(wait, ModelUnavailable) for wait in waits)
        assert {wait.failure.code for wait in waits if isinstance(wait, ModelUnavailable)} == {Code.LOAD_TIMEOUT}


async def test_a_model_that_cannot_be_loaded_says_why_and_is_not_tried_again(home: Path) -> None:
    options = f"--exit-on-load 66 --goodbye-code {Code.MODEL_MISSING.value}"
    async with Running(config(home), options) as running:
        for _ in range(3):
            with pytest.raises(ModelUnavailable) as caught:
                await running.pool.ensure_ready("m")
            assert caught.value.failure.message == "cannot be loaded"
            assert caught.value.failure.code is Code.MODEL_MISSING
        assert running.pool.worker("m").epoch == 1


async def test_a_crash_loop_opens_the_breaker_and_others_do_not_notice(home: Path) -> None:
    async with Running(config(home, ("a", "b")), "a:--exit-on-load 70") as running:
        worker = running.pool.worker("a")
        async with asyncio.timeout(patient(30)):
            while worker.state is not State.FAILED:
                with pytest.raises(ModelUnavailable) as caught:
                    await running.pool.ensure_ready("a")
                assert text_of(await running.complete("b")) == tokens(5)
        assert caught.value.retry_after_s > 100
        assert "about to fail" in caught.value.failure.detail
        assert running.events.exits == [70, 70, 70]


async def test_stop_while_loading_ends_the_process_and_wakes_the_waiter(home: Path) -> None:
    async with Running(config(home), "--load-s 60", limits=quick()) as running:
        waiting = asyncio.create_task(running.pool.ensure_ready("m"))
        worker = running.pool.worker("m")
        await until(lambda: worker.state is State.LOADING)
        running.note_pids()
        await running.pool.unload("m")
        with pytest.raises(ModelUnavailable):
            await waiting
        assert worker.state is State.STOPPED


async def test_two_requests_for_a_cold_model_share_one_process(home: Path) -> None:
    async with Running(config(home), "--load-s 0.1") as running:
        both = await asyncio.gather(running.complete(), running.complete())
        assert [text_of(deltas) for deltas in both] == [tokens(5), tokens(5)]
        assert running.pool.worker("m").epoch == 1


def submit_until_gone(running: Running, worker: WorkerHandle) -> list[Collector]:
    """Submit without letting the loop run. Returns what the socket took before it knew."""
    lost: list[Collector] = []
    deadline = time.monotonic() + patient(5)
    while time.monotonic() < deadline:
        try:
            lost.append(running.generate(worker))
        except WorkerGone:
            return lost
        time.sleep(0.005)
    raise AssertionError("the socket never noticed")


async def test_a_request_sent_as_the_worker_dies_is_refused_unsent_and_a_retry_is_served(home: Path) -> None:
    async with Running(config(home)) as running:
        worker = await running.ready()
        os.kill(worker.pid, signal.SIGKILL)
        # The loop does not run in between, so the pool cannot know yet: only the socket does, in a moment.
        lost = submit_until_gone(running, worker)
        assert not worker.is_ready
        for stream in lost:
            assert text_of(await read_all(stream)) == tokens(5)
        assert text_of(await running.complete()) == tokens(5)
        assert running.link.in_flight == 0


async def test_a_request_that_can_be_given_to_no_other_worker_ends_with_its_own(home: Path) -> None:
    async with Running(config(home), limits=WorkerLimits(resume=ResumeLimits(fruitless=0))) as running:
        worker = await running.ready()
        stream = running.generate(worker, text="ignored")
        assert await stream.read_deltas(0.05) == []
        os.kill(worker.pid, signal.SIGKILL)
        deltas = await read_all(stream)
        assert deltas[-1].failure is not None
        assert deltas[-1].failure.code is Code.WORKER_DIED


async def test_messages_of_another_epoch_are_dropped_and_counted(home: Path) -> None:
    async with Running(config(home)) as running:
        deltas = await running.complete(text="stale", max_tokens=20)
        assert text_of(deltas) == tokens(20)
        assert running.events.stale == 2


async def test_a_worker_that_claims_another_epoch_is_never_ready(home: Path) -> None:
    async with Running(config(home), "--epoch-offset 7", limits=quick()) as running:
        waiting = asyncio.create_task(running.pool.ensure_ready("m"))
        # Its Hello and its Ready.
        await until(lambda: running.events.stale >= 2)
        assert running.pool.worker("m").state is State.STARTING
        assert not waiting.done()
        await running.pool.unload("m")
        with pytest.raises(ModelUnavailable):
            await waiting


async def test_a_second_worker_of_the_same_name_is_refused(home: Path) -> None:
    async with Running(config(home)) as running:
        deltas = await running.complete(text="twin", max_tokens=20)
        assert text_of(deltas) == tokens(20)
        assert running.events.stale == 2
        assert running.pool.worker("m").epoch == 1


async def test_a_worker_of_another_protocol_is_marked_and_not_started_again(home: Path) -> None:
    async with Running(config(home), "--protocol 99", limits=quick()) as running:
        for _ in range(2):
            with pytest.raises(ModelUnavailable) as caught:
                await running.pool.ensure_ready("m")
            assert caught.value.failure.code is Code.INCOMPATIBLE
        await until(lambda: running.pool.worker("m").state is State.INCOMPATIBLE)
        assert running.pool.worker("m").epoch == 1


async def test_malformed_frames_are_counted_and_harm_nobody(home: Path) -> None:
    async with Running(config(home)) as running:
        deltas = await running.complete(text="garbage", max_tokens=20)
        assert text_of(deltas) == tokens(20)
        assert running.events.malformed == 6


async def test_a_rejected_request_ends_with_its_failure(home: Path) -> None:
    async with Running(config(home)) as running:
        deltas = await running.complete(text="refused")
        assert len(deltas) == 1
        assert deltas[0].failure is not None
        assert deltas[0].failure.code is Code.INVALID_REQUEST


async def test_an_aborted_request_is_forgotten_at_once_and_freed_in_the_worker(home: Path) -> None:
    async with Running(config(home), limits=quick()) as running:
        worker = await running.ready()
        stream = running.generate(worker, max_tokens=1_000_000)
        await stream.read_deltas()
        for _ in range(2):
            running.link.abort(stream.rids, "client")
        running.link.abort([123], "client")
        assert running.link.in_flight == 0
        await until(lambda: worker.stats is not None and worker.stats.running == 0)


async def test_a_reader_that_never_comes_costs_one_delta(home: Path) -> None:
    async with Running(config(home), "--step-ms 1", "--tokens-per-step 10") as running:
        worker = await running.ready()
        slow = running.generate(worker, max_tokens=3000)
        assert text_of(await read_all(running.generate(worker, max_tokens=3000))) == tokens(3000)
        await until(lambda: running.link.in_flight == 0)
        deltas = await slow.read_deltas()
        assert len(deltas) == 1
        assert deltas[0].text == tokens(3000)


async def test_unload_lets_a_running_stream_finish(home: Path) -> None:
    async with Running(config(home)) as running:
        stream = running.generate(await running.ready(), max_tokens=60)
        await asyncio.gather(running.pool.unload("m"), collected := asyncio.create_task(read_all(stream)))
        assert text_of(collected.result()) == tokens(60)


async def test_stop_aborts_what_does_not_finish_in_time(home: Path) -> None:
    async with Running(config(home)) as running:
        stream = running.generate(await running.ready(), max_tokens=1_000_000)
        collected = asyncio.create_task(read_all(stream))
        await running.pool.stop(0.2)
        deltas: list[Delta] = await collected
        assert finish_of(deltas) is Finish.ABORT


async def test_a_worker_that_ignores_every_request_to_leave_is_killed(home: Path) -> None:
    async with Running(config(home), "--ignore-sigterm", limits=quick()) as running:
        await running.ready()
        running.note_pids()
        await running.pool.stop(0.1)
        assert running.events.exits == [-signal.SIGKILL]


async def test_descriptors_do_not_leak_over_many_workers(home: Path) -> None:
    async with Running(config(home)) as running:
        await running.complete()
        await running.pool.unload("m")
        before = len(os.listdir("/dev/fd"))
        for _ in range(5):
            await running.complete()
            await running.pool.unload("m")
        await until(lambda: len(os.listdir("/dev/fd")) <= before)
