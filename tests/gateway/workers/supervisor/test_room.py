"""A worker's state machine and its memory: admitted, denied, gated, evicted, recycled."""

import asyncio

import pytest

from gateway.workers.supervisor.state import ModelUnavailable, State
from protocol.failures import Code, Failure
from protocol.to_worker import Shutdown
from tests.support.machine import Machine, settle

pytestmark = pytest.mark.anyio
TOO_LARGE = Failure(Code.DOES_NOT_FIT, "it needs too much")
NO_MEMORY = Failure(Code.OUT_OF_MEMORY, "try again")


async def test_a_worker_is_started_with_the_share_that_it_was_given() -> None:
    async with Machine() as m:
        m.world.memory_bytes = 123
        await m.bring_up()
        assert [spec.memory_bytes for spec in m.world.specs] == [123]
        assert m.world.entries == [State.STARTING, State.LOADING, State.READY]


async def test_a_denial_is_told_to_all_who_wait_and_the_next_request_asks_again() -> None:
    async with Machine(is_preload=True) as m:
        m.world.denial = TOO_LARGE
        for asker in [await m.ask(), await m.ask()]:
            with pytest.raises(ModelUnavailable) as caught:
                await asker
            assert (caught.value.failure, caught.value.retry_after_s) == (TOO_LARGE, 0.0)
        assert m.worker.state is State.STOPPED
        assert m.world.processes == []
        m.world.denial = None
        await m.bring_up()


async def test_an_error_of_ours_in_the_wait_for_memory_is_one_models_and_ends_nothing() -> None:
    async with Machine() as m:
        m.world.admission_error = OSError("no route to another machine")
        asker = await m.ask()
        with pytest.raises(ModelUnavailable, match="internal error"):
            await asker
        assert m.worker.state is State.STOPPED
        m.world.admission_error = None
        await m.bring_up()


async def test_behind_a_closed_gate_what_runs_goes_on_and_what_comes_waits() -> None:
    async with Machine() as m:
        await m.bring_up()
        sequence = m.run()
        m.worker.close_gate()
        late = await m.ask()
        await m.speak(sequence)
        assert (m.worker.is_ready, m.worker.state, late.done()) == (False, State.READY, False)
        m.worker.open_gate()
        await late
        assert len(m.world.processes) == 1


async def test_an_evicted_worker_ends_gently_and_whoever_waits_is_served_by_the_next() -> None:
    async with Machine() as m:
        await m.bring_up()
        assert m.worker.evict()
        assert not m.worker.is_ready, "at once"
        late = await m.ask()
        assert m.worker.state is State.STOPPING
        assert m.world.sent[-1] == Shutdown()
        await m.crash(0)
        await m.succeed()
        await late
        assert (m.worker.epoch, m.worker.restart_policy.restarts, m.worker.is_ready) == (2, 0, True)


async def test_an_evicted_worker_that_nobody_wants_stays_away() -> None:
    async with Machine() as m:
        await m.bring_up()
        assert m.worker.evict()
        await settle()
        await m.crash(0)
        await m.world.pass_time(100.0)
        assert m.worker.state is State.STOPPED
        assert len(m.world.processes) == 1


async def test_only_a_ready_worker_without_parked_sequences_is_evicted() -> None:
    async with Machine() as m:
        assert not m.worker.evict()
        await m.bring_up()
        sequence = m.run()
        m.give_up(sequence)
        assert not m.worker.evict()


async def test_what_was_on_its_way_to_an_evicted_worker_goes_on_at_the_next() -> None:
    async with Machine() as m:
        await m.bring_up()
        assert m.worker.evict()
        sequence = m.run()
        await settle()
        await m.crash(0)
        await m.succeed()
        assert m.world.resumed == [(2, sequence.rid)]
        assert m.world.failed == []


async def test_a_recycled_worker_loses_no_sequence() -> None:
    async with Machine() as m:
        await m.bring_up()
        sequence = m.run(tokens=3)
        m.worker.recycle()
        await settle()
        await m.crash(0)
        await m.succeed()
        assert m.world.resumed == [(2, sequence.rid)]
        assert (m.worker.restart_policy.restarts, m.world.failed) == (0, [])


async def test_an_overload_refuses_new_requests_but_no_resumed_ones() -> None:
    async with Machine() as m:
        await m.bring_up()
        sequence = m.run(tokens=3)
        m.worker.process.overload = NO_MEMORY
        assert m.worker.refusal(sequence.generate) == NO_MEMORY
        assert m.events.refusals == ["m"]
        await m.crash(-9)
        await m.succeed()
        assert m.world.resumed == [(2, sequence.rid)]


async def test_room_is_no_longer_asked_for_when_nobody_waits() -> None:
    async with Machine() as m:
        m.world.room.clear()
        waiting = await m.ask()
        await m.world.pass_time(3.0)
        assert m.worker.state is State.STARTING
        waiting.cancel()
        await asyncio.wait([waiting])
        await m.world.pass_time(1.5)
        assert m.worker.state is State.STOPPED
        m.world.room.set()
        await m.bring_up()


async def test_a_preloaded_model_that_made_room_is_no_longer_waited_for() -> None:
    async with Machine(is_preload=True) as m:
        await m.bring_up()
        assert m.worker.view().is_preload
        assert m.worker.evict()
        await settle()
        assert not m.worker.view().is_preload
        await m.crash(0)
        assert m.worker.state is State.STOPPED, "nobody asks for it"
