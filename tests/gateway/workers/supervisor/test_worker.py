import asyncio
import signal

import pytest
from msgspec.structs import replace

from gateway.link.parked_sequences import ResumeLimits
from gateway.link.sequence import PARKED
from gateway.workers.supervisor.state import ModelUnavailable, State, WorkerLimits
from protocol import PROTOCOL
from protocol.failures import Code, Failure
from protocol.from_worker import AdapterInfo, AdaptersSet, Drained, Goodbye, Loading
from protocol.to_worker import Drain, Dump, SetAdapters, Shutdown, Welcome
from tests.support.machine import FakeProcess, Machine, settle
from tests.support.scale import patient

pytestmark = pytest.mark.anyio


async def unavailable(task: asyncio.Task[None]) -> ModelUnavailable:
    with pytest.raises(ModelUnavailable) as caught:
        await asyncio.wait_for(task, patient(5))
    return caught.value


# -- loading ---------------------------------------------------------------------------------------------------------


async def test_two_requests_for_a_cold_model_share_one_load() -> None:
    async with Machine() as m:
        first, second = await m.ask(), await m.ask()
        assert len(m.world.processes) == 1
        m.hello()
        m.ready()
        await asyncio.gather(first, second)
        assert m.worker.is_ready
        assert m.events.states == [State.STARTING, State.LOADING, State.READY]
        assert m.events.loads == [1.5]


async def test_a_worker_is_welcomed_once_with_our_boot() -> None:
    async with Machine() as m:
        await m.ask()
        m.hello()
        m.hello()
        await settle()
        assert m.world.sent == [Welcome(PROTOCOL, 77, 1.0)]


async def test_a_worker_that_introduces_itself_twice_is_one_worker() -> None:
    async with Machine() as m:
        waiting = await m.ask()
        for _ in range(2):
            m.hello()
            m.ready()
        await waiting
        assert m.events.states == [State.STARTING, State.LOADING, State.READY]
        assert m.events.loads == [1.5]


async def test_a_welcome_waits_until_the_worker_is_routable() -> None:
    async with Machine() as m:
        await m.ask()
        m.world.is_unreachable = True
        m.hello()
        await settle()
        m.world.is_unreachable = False
        await m.world.pass_time(0.1)
        assert [type(message) for message in m.world.sent] == [Welcome]


async def test_a_loaded_worker_serves_only_when_it_is_routable() -> None:
    async with Machine() as m:
        waiting = await m.ask()
        m.world.is_unreachable = True
        m.hello()
        m.ready()
        await settle()
        assert m.worker.state is State.LOADING
        m.world.is_unreachable = False
        await m.world.pass_time(0.1)
        await waiting
        assert m.worker.state is State.READY
        await m.world.pass_time(10.0)
        assert (m.worker.state, len(m.world.processes)) == (State.READY, 1)


async def test_a_ready_model_answers_without_a_task_switch() -> None:
    async with Machine() as m:
        await m.bring_up()
        coroutine = m.worker.ensure_ready()
        with pytest.raises(StopIteration):
            coroutine.send(None)


async def test_a_load_waits_for_room_and_can_be_stopped_meanwhile() -> None:
    async with Machine() as m:
        m.world.room.clear()
        waiting = await m.ask()
        assert m.world.processes == []
        await m.worker.stop(0.0)
        assert (await unavailable(waiting)).failure.code is Code.DRAINING
        m.world.room.set()
        await settle()
        assert m.world.processes == []
        assert m.worker.state is State.STOPPED


async def test_a_load_past_its_deadline_wakes_its_waiters_and_ends_the_process() -> None:
    async with Machine() as m:
        waiting = await m.ask()
        m.hello()
        await m.world.pass_time(601.0)
        reason = await unavailable(waiting)
        assert reason.failure.code is Code.LOAD_TIMEOUT
        assert reason.retry_after_s > 0
        await m.world.pass_time(20.0)
        assert m.world.process.signals == [signal.SIGTERM, signal.SIGKILL]
        await m.crash(-9)
        assert m.worker.restart_policy.last_failure is not None
        assert m.worker.restart_policy.last_failure.code is Code.LOAD_TIMEOUT


async def test_large_weights_have_more_time_to_load() -> None:
    async with Machine() as m:
        waiting = await m.ask()
        m.hello()
        m.post(Loading(1, "weights", 0, 5_000_000_000))
        m.post(Loading(1, "warmup"))
        await m.world.pass_time(601.0)
        assert m.worker.state is State.LOADING
        await m.world.pass_time(100.0)
        assert (await unavailable(waiting)).failure.code is Code.LOAD_TIMEOUT
        await m.world.pass_time(20.0)
        assert m.world.process.signals == [signal.SIGTERM, signal.SIGKILL]


async def test_a_process_that_cannot_be_spawned_is_a_crash_with_its_reason() -> None:
    async with Machine() as m:
        m.world.spawn_error = FileNotFoundError("no python")
        waiting = await m.ask()
        await m.world.pass_time(5.0)
        assert "no python" in (await unavailable(waiting)).failure.message


@pytest.mark.parametrize("status", [64, 66, 71])
async def test_a_final_exit_is_not_retried_until_somebody_asks_explicitly(status: int) -> None:
    async with Machine(is_preload=True) as m:
        waiting = await m.ask()
        m.hello()
        m.post(Goodbye(m.worker.epoch, "load", Failure(Code.MODEL_MISSING, "no such folder")))
        await m.crash(status)
        reason = await unavailable(waiting)
        assert (reason.failure.message, reason.retry_after_s) == ("no such folder", 0.0)
        await m.world.pass_time(10_000.0)
        assert (await unavailable(await m.ask())).failure.message == "no such folder"
        assert len(m.world.processes) == 1
        explicit = asyncio.create_task(m.worker.load())
        await settle()
        m.hello()
        m.ready()
        await explicit


async def test_a_final_exit_is_retried_once_for_each_change_of_the_models_files() -> None:
    async with Machine() as m:
        for attempt in range(1, 4):
            m.world.files += 1
            waiting = await m.ask()
            m.hello()
            m.post(Goodbye(m.worker.epoch, "load", Failure(Code.MODEL_CORRUPT, f"incomplete {attempt}")))
            await m.crash(66)
            assert (await unavailable(waiting)).failure.message == f"incomplete {attempt}"
            assert (await unavailable(await m.ask())).failure.message == f"incomplete {attempt}"
            assert len(m.world.processes) == attempt
        m.world.files += 1
        served = await m.ask()
        m.hello()
        m.ready()
        await served


async def test_files_that_change_during_the_failed_load_are_tried_again() -> None:
    async with Machine() as m:
        waiting = await m.ask()
        m.world.files += 1
        await m.crash(66)
        await unavailable(waiting)
        await m.ask()
        assert len(m.world.processes) == 2


async def test_a_protocol_mismatch_is_final_and_does_not_loop() -> None:
    async with Machine(is_preload=True) as m:
        waiting = await m.ask()
        m.hello(protocol=9)
        await settle()
        assert (await unavailable(waiting)).failure.code is Code.INCOMPATIBLE
        await m.crash(0)
        assert m.worker.state is State.INCOMPATIBLE
        await m.world.pass_time(10_000.0)
        assert (await unavailable(await m.ask())).failure.code is Code.INCOMPATIBLE
        assert len(m.world.processes) == 1


async def test_exit_status_69_is_incompatible() -> None:
    async with Machine() as m:
        waiting = await m.ask()
        await m.crash(69)
        await unavailable(waiting)
        assert m.worker.state is State.INCOMPATIBLE


async def test_a_hello_from_another_process_is_refused_and_counted() -> None:
    async with Machine() as m:
        await m.ask()
        m.hello(pid=4711)
        await settle()
        assert m.worker.state is State.STARTING
        assert m.events.stale == 1


# -- stopping --------------------------------------------------------------------------------------------------------


async def test_stop_while_loading_wakes_waiters_and_a_late_ready_is_ignored() -> None:
    async with Machine() as m:
        waiting = await m.ask()
        m.hello()
        await settle()
        stopping = asyncio.create_task(m.worker.stop(30.0))
        await settle()
        assert (await unavailable(waiting)).failure.code is Code.DRAINING
        m.ready()
        await settle()
        assert m.worker.state is State.STOPPING
        await m.crash(0)
        await stopping
        m.ready(epoch=1)
        await settle()
        assert m.worker.state is State.STOPPED
        assert m.worker.restart_policy.last_failure is None


async def test_stop_drains_then_shuts_down_then_escalates() -> None:
    async with Machine() as m:
        await m.bring_up(weights_bytes=40_000_000_000)
        m.world.sent.clear()
        stopping = asyncio.create_task(m.worker.stop(30.0))
        await settle()
        assert m.world.sent == [Drain(30.0)]
        m.post(Drained(1, 0))
        await settle()
        assert m.world.sent == [Drain(30.0), Shutdown()]
        await m.world.pass_time(2.0)
        assert m.world.process.signals == [signal.SIGTERM]
        await m.world.pass_time(17.9)
        assert m.world.process.signals == [signal.SIGTERM]
        await m.world.pass_time(0.2)
        assert m.world.process.signals == [signal.SIGTERM, signal.SIGKILL]
        await m.crash(-9)
        await stopping
        assert m.world.process.is_closed


async def test_a_worker_that_exits_in_time_is_not_signalled() -> None:
    async with Machine() as m:
        await m.bring_up()
        stopping = asyncio.create_task(m.worker.stop(0.0))
        await settle()
        await m.crash(0)
        await stopping
        await m.world.pass_time(100.0)
        assert m.world.process.signals == []


async def test_a_drain_that_is_never_answered_ends_at_its_deadline() -> None:
    async with Machine() as m:
        await m.bring_up()
        stopping = asyncio.create_task(m.worker.stop(5.0))
        await m.world.pass_time(6.5)
        assert m.worker.state is State.STOPPING
        await m.crash(0)
        await stopping


async def test_a_second_stop_cuts_a_drain_short() -> None:
    async with Machine() as m:
        await m.bring_up()
        first = asyncio.create_task(m.worker.stop(500.0))
        await settle()
        second = asyncio.create_task(m.worker.stop(0.0))
        await settle()
        assert m.worker.state is State.STOPPING
        await m.crash(0)
        await asyncio.gather(first, second)


async def test_stop_of_a_stopped_worker_returns() -> None:
    async with Machine() as m:
        await m.worker.stop(0.0)
        assert m.world.processes == []


async def test_a_request_during_an_unload_is_served_by_the_next_worker() -> None:
    async with Machine() as m:
        await m.bring_up()
        stopping = asyncio.create_task(m.worker.stop(30.0))
        await settle()
        waiting = await m.ask()
        m.post(Drained(1, 0))
        await settle()
        await m.crash(0)
        await stopping
        m.hello()
        m.ready()
        await waiting
        assert m.worker.epoch == 2
        assert m.worker.restart_policy.restarts == 0


async def test_closing_refuses_everything_and_never_starts_again() -> None:
    async with Machine(is_preload=True) as m:
        await m.bring_up()
        closing = asyncio.create_task(m.worker.stop(30.0, is_closing=True))
        await settle()
        assert (await unavailable(await m.ask())).failure.code is Code.DRAINING
        await m.crash(-11)
        await closing
        assert (await unavailable(await m.ask())).failure.code is Code.DRAINING
        assert len(m.world.processes) == 1


async def test_restart_starts_again_even_when_its_caller_has_left() -> None:
    async with Machine() as m:
        await m.bring_up()
        restarting = asyncio.create_task(m.worker.restart())
        await settle()
        restarting.cancel()
        await settle()
        await m.crash(0)
        assert m.worker.state is State.STARTING
        assert m.worker.epoch == 2


# -- another specification -------------------------------------------------------------------------------------------


def change(m: Machine, *, is_reload: bool = True, context: int = 99) -> None:
    m.worker.change(replace(m.worker.spec, context=context), is_preload=False, is_reload=is_reload)


async def test_a_ready_worker_is_replaced_by_one_of_the_new_specification_and_its_sequences_go_on() -> None:
    async with Machine() as m:
        await m.bring_up()
        sequence = m.run(tokens=3)
        change(m)
        await settle()
        assert (m.worker.state, sequence.epoch) == (State.STOPPING, PARKED)
        await m.crash(0)
        await m.succeed()
        assert (m.worker.state, sequence.epoch, sequence.is_over) == (State.READY, 2, False)
        assert [spec.context for spec in m.world.specs] == [0, 99]
        assert m.worker.restart_policy.restarts == 0


def adapt(m: Machine, *adapters: tuple[str, str]) -> None:
    m.worker.change(replace(m.worker.spec, adapters=adapters), is_preload=False, is_reload=False)


def orders(m: Machine) -> list[SetAdapters]:
    """Orders about adapters that the worker was sent."""
    return [message for message in m.world.sent if isinstance(message, SetAdapters)]


async def test_a_worker_is_told_of_other_adapters_and_what_it_has_is_known_from_then_on() -> None:
    async with Machine() as m:
        sql, docs = ("sql", "/sql"), ("docs", "/docs")
        adapt(m, sql)
        await m.bring_up()
        # It was started with others than it is to have now.
        assert orders(m) == [SetAdapters(0, (sql,))]
        m.post(AdaptersSet(1, 0, (AdapterInfo(*sql, rank=4),), 2000))
        await settle()
        assert m.worker.ready is not None
        assert ([info.name for info in m.worker.ready.adapters], m.worker.ready.weights_bytes) == (["sql"], 2000)
        # One after the other, although nothing was answered yet.
        adapt(m, sql, docs)
        adapt(m, sql)
        adapt(m, sql)
        await settle()
        assert orders(m)[1:] == [SetAdapters(0, (sql, docs)), SetAdapters(0, (sql,))]
        assert (m.worker.state, m.worker.epoch) == (State.READY, 1)


async def test_a_change_that_needs_no_other_worker_waits_for_the_next_one() -> None:
    async with Machine() as m:
        await m.bring_up()
        change(m, is_reload=False)
        await settle()
        assert (m.worker.state, m.worker.epoch) == (State.READY, 1)
        await m.crash()
        await m.ask()
        assert [spec.context for spec in m.world.specs] == [0, 99]


async def test_whoever_waits_for_a_load_gets_the_new_specification() -> None:
    async with Machine() as m:
        waiting = await m.ask()
        m.hello()
        await settle()
        change(m)
        await settle()
        await m.crash(0)
        await m.succeed()
        await waiting
        assert m.world.specs[-1].context == 99


async def test_a_model_that_waits_for_room_begins_anew_with_the_new_specification() -> None:
    async with Machine() as m:
        m.world.room.clear()
        waiting = await m.ask()
        change(m)
        await settle()
        m.world.room.set()
        await settle()
        await m.succeed()
        await waiting
        assert [spec.context for spec in m.world.specs] == [99]


async def test_a_stopped_worker_stays_stopped() -> None:
    async with Machine() as m:
        change(m)
        await settle()
        assert (m.worker.state, m.world.processes) == (State.STOPPED, [])


async def test_a_model_that_could_not_be_loaded_may_be_tried_again_after_a_change() -> None:
    async with Machine() as m:
        waiting = await m.ask()
        m.hello()
        await settle()
        m.post(Goodbye(1, "load failed", Failure(Code.BAD_CONFIG, "a bad template")))
        await m.crash(64)
        assert (await unavailable(waiting)).failure.code is Code.BAD_CONFIG
        assert m.worker.state is State.FAILED
        change(m)
        again = await m.ask()
        await m.succeed()
        await again
        assert m.world.specs[-1].context == 99


# -- crashes ---------------------------------------------------------------------------------------------------------


async def test_streams_that_can_go_nowhere_end_with_a_reason_fit_for_clients() -> None:
    async with Machine(limits=WorkerLimits(resume=ResumeLimits(fruitless=0))) as m:
        await m.bring_up()
        m.run()
        m.world.process.exit(-9)
        await settle()
        assert m.world.detached[-1] == 1
        assert m.world.failed[-1].code is Code.WORKER_DIED
        assert "SIGKILL" in m.world.failed[-1].message
        assert "last words" in m.world.failed[-1].detail
        assert m.events.exits == [-9]


async def test_after_the_first_crash_the_next_request_starts_a_new_worker_at_once() -> None:
    async with Machine() as m:
        await m.bring_up()
        await m.crash()
        assert m.worker.state is State.STOPPED
        await m.ask()
        assert (m.worker.state, m.worker.epoch, m.worker.restart_policy.restarts) == (State.STARTING, 2, 1)


async def test_a_preloaded_model_is_started_again_without_a_request() -> None:
    async with Machine(is_preload=True) as m:
        await m.bring_up()
        await m.crash()
        assert (m.worker.state, m.worker.epoch) == (State.STARTING, 2)


async def test_a_request_that_waits_through_a_first_load_crash_gets_the_second_load() -> None:
    async with Machine() as m:
        waiting = await m.ask()
        await m.crash(-9)
        m.hello()
        m.ready()
        await waiting
        assert m.worker.epoch == 2


async def test_a_second_crash_backs_off_and_a_request_meanwhile_waits_for_the_next_start() -> None:
    async with Machine() as m:
        m.world.jitter = 0.9
        await m.bring_up()
        await m.crash()
        await m.bring_up()
        await m.crash()
        assert m.worker.state is State.BACKOFF
        waiting = await m.ask()
        await m.world.pass_time(0.4)
        assert m.worker.state is State.BACKOFF
        await m.world.pass_time(0.1)
        m.hello()
        m.ready()
        await waiting


async def test_backoff_without_demand_ends_stopped() -> None:
    async with Machine() as m:
        for _ in range(2):
            await m.bring_up()
            await m.crash()
        assert m.worker.state is State.BACKOFF
        await m.world.pass_time(1.0)
        assert m.worker.state is State.STOPPED


async def test_three_crashes_while_loading_open_the_breaker_and_say_when_to_come_back() -> None:
    async with Machine() as m:
        waiting = await m.ask()
        await m.crash(70)
        await m.crash(70)
        assert m.worker.state is State.BACKOFF
        third = await m.ask()
        assert not waiting.done(), "one more try is near"
        await m.world.pass_time(1.0)
        await m.crash(70)
        for waiter in (waiting, third):
            assert 250 < (await unavailable(waiter)).retry_after_s <= 300
        assert m.worker.state is State.FAILED
        reason = await unavailable(await m.ask())
        assert 250 < reason.retry_after_s <= 300
        assert "70" in reason.failure.message or "step loop" in reason.failure.message
        assert len(m.world.processes) == 3


async def test_an_open_breaker_allows_one_try_after_five_minutes() -> None:
    async with Machine() as m:
        m.world.jitter = 0.0
        for _ in range(5):
            await m.bring_up()
            await m.crash()
        assert m.worker.state is State.FAILED
        await m.world.pass_time(299.0)
        await unavailable(await m.ask())
        await m.world.pass_time(2.0)
        await m.bring_up()
        await m.crash()
        assert m.worker.state is State.FAILED


async def test_an_explicit_load_closes_the_breaker() -> None:
    async with Machine() as m:
        m.world.jitter = 0.0
        for _ in range(5):
            await m.bring_up()
            await m.crash()
        loading = asyncio.create_task(m.worker.load())
        await settle()
        m.hello()
        m.ready()
        await loading
        await m.crash()
        assert m.worker.state is State.STOPPED


async def test_a_clean_exit_that_nobody_asked_for_is_not_a_crash() -> None:
    async with Machine() as m:
        for _ in range(8):
            await m.bring_up()
            await m.crash(0)
            assert m.worker.state is State.STOPPED


async def test_a_worker_that_was_found_unreachable_is_not_handed_out_again() -> None:
    async with Machine() as m:
        await m.bring_up()
        m.lose_touch()
        waiting = await m.ask()
        assert not waiting.done()
        await m.crash()
        m.hello()
        m.ready()
        await waiting
        assert m.worker.epoch == 2


async def test_an_unreachable_worker_that_does_not_die_is_ended() -> None:
    async with Machine() as m:
        await m.bring_up()
        m.lose_touch()
        await m.world.pass_time(2.6)
        assert m.world.process.signals == [signal.SIGABRT]


# -- stuck -----------------------------------------------------------------------------------------------------------


async def beat(m: Machine, seconds: int, *, running: int = 0, step_age_ms: int = 0) -> None:
    for _ in range(seconds):
        await m.world.pass_time(1.0)
        m.pong(running=running, step_age_ms=step_age_ms)
        await settle()


# A sequence counts as running after its first step, so a loop that hangs in it runs none.
@pytest.mark.parametrize("running", [0, 1])
async def test_a_step_older_than_the_limit_is_dumped_aborted_and_killed(running: int) -> None:
    async with Machine(limits=WorkerLimits(step_s=60.0)) as m:
        await m.bring_up()
        await beat(m, 5, running=running, step_age_ms=60_000)
        assert m.worker.state is State.READY
        m.world.sent.clear()
        m.pong(running=running, step_age_ms=60_001)
        await settle()
        assert m.world.sent == [Dump(0)]
        assert m.world.detached == [1]
        assert m.events.stuck_workers == 1
        await m.world.pass_time(0.6)
        assert m.world.process.signals == [signal.SIGABRT]
        await m.world.pass_time(5.1)
        assert m.world.process.signals == [signal.SIGABRT, signal.SIGKILL]
        await m.crash(-9)
        await m.ask()
        assert m.worker.state is State.STARTING


async def test_silence_is_ended_after_its_limit() -> None:
    async with Machine() as m:
        await m.bring_up()
        await beat(m, 3)
        await m.world.pass_time(14.5)
        assert m.worker.state is State.READY
        await m.world.pass_time(2.0)
        assert m.worker.state is State.STOPPING
        assert m.events.stuck_workers == 1


async def test_silence_while_loading_is_left_to_the_load_deadline() -> None:
    async with Machine() as m:
        await m.ask()
        m.hello()
        await m.world.pass_time(100.0)
        assert m.worker.state is State.LOADING


async def test_a_machine_that_slept_kills_nobody_on_wake() -> None:
    async with Machine() as m:
        await m.bring_up()
        await beat(m, 3)
        m.world.jump(3600.0)
        await m.world.pass_time(1.0)
        assert m.worker.state is State.READY
        await beat(m, 30)
        assert m.worker.state is State.READY


async def test_a_stuck_worker_under_stop_is_not_started_again() -> None:
    async with Machine(is_preload=True) as m:
        await m.bring_up()
        stopping = asyncio.create_task(m.worker.stop(100.0))
        await m.world.pass_time(17.0)
        assert m.world.process.signals[0] == signal.SIGABRT
        await m.crash(-6)
        await stopping
        assert m.worker.state is State.STOPPED


# -- adoption --------------------------------------------------------------------------------------------------------


async def test_an_adopted_worker_is_ready_once_it_has_said_so() -> None:
    async with Machine() as m:
        process = FakeProcess(pid=4242, is_adopted=True)
        m.worker.adopt(process, 17)
        await settle()
        assert m.world.sent == [Welcome(PROTOCOL, 77, 1.0)]
        waiting = await m.ask()
        for _ in range(2):
            m.hello()
            m.ready()
        await settle()
        # What it still does for clients of the earlier gateway ends first.
        assert m.world.sent[1:] == [Drain(0.0)]
        assert not waiting.done()
        m.post(Drained(17, 3))
        await waiting
        assert (m.worker.epoch, m.worker.pid) == (17, 4242)
        assert m.world.processes == []
        assert m.events.loads == []


async def test_an_adopted_worker_whose_ready_arrives_before_it_is_routable_is_kept() -> None:
    async with Machine() as m:
        m.world.is_unreachable = True
        m.worker.adopt(FakeProcess(pid=4242, is_adopted=True), 17)
        await settle()
        # It was loaded while there was no gateway: its messages waited in its socket.
        m.hello()
        m.ready()
        await settle()
        assert m.world.sent == []
        m.world.is_unreachable = False
        await m.world.pass_time(0.1)
        assert m.world.sent == [Welcome(PROTOCOL, 77, 1.0), Drain(0.0)]
        m.post(Drained(17, 0))
        await settle()
        assert m.worker.state is State.READY


async def test_an_adopted_worker_that_stays_silent_is_replaced() -> None:
    async with Machine() as m:
        process = FakeProcess(pid=4242, is_adopted=True)
        m.worker.adopt(process, 17)
        waiting = await m.ask()
        await m.world.pass_time(10.5)
        assert m.worker.state is State.STOPPING
        process.exit(None)
        await m.world.pass_time(0.1)
        m.hello()
        m.ready()
        await waiting
        assert len(m.world.processes) == 1


async def test_an_adopted_worker_of_another_protocol_is_replaced_by_one_of_ours() -> None:
    async with Machine() as m:
        process = FakeProcess(pid=4242, is_adopted=True)
        m.worker.adopt(process, 17)
        await settle()
        m.hello(protocol=9)
        await settle()
        assert m.worker.state is State.STOPPING
        process.exit(None)
        await m.world.pass_time(0.1)
        m.hello()
        m.ready()
        await settle()
        assert (m.worker.state, len(m.world.processes)) == (State.READY, 1)


async def test_an_adopted_worker_that_cannot_let_go_of_its_work_is_replaced() -> None:
    async with Machine() as m:
        m.worker.adopt(FakeProcess(pid=4242, is_adopted=True), 17)
        await settle()
        m.hello()
        m.ready()
        await m.world.pass_time(10.5)
        assert m.worker.state is State.STOPPING


async def test_the_death_of_an_adopted_worker_is_a_crash() -> None:
    async with Machine() as m:
        process = FakeProcess(pid=4242, is_adopted=True)
        m.worker.adopt(process, 17)
        await settle()
        m.hello()
        m.ready()
        m.post(Drained(17, 0))
        await settle()
        process.exit(None)
        await m.world.pass_time(0.1)
        assert m.events.exits == [255]
        assert m.worker.restart_policy.last_failure is not None
        assert m.worker.restart_policy.last_failure.code is Code.WORKER_DIED
