"""The memory broker over real processes without a model: who is loaded, who makes room, what is recycled."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from gateway.config.settings import Config, MemoryConfig
from gateway.workers.memory.host import ThisMachine
from gateway.workers.supervisor.state import ModelUnavailable, State, WorkerLimits
from protocol.failures import Code
from protocol.from_worker import Delta, Finish
from tests.support.pool import DEADLINE_S, Running, config, finish_of, read_all, short_home, text_of, tokens, until
from tests.support.scale import patient

pytestmark = pytest.mark.anyio

MIB = 1 << 20
QUICK = WorkerLimits(
    heartbeat_s=0.05,
    term_s=0.2,
    grace_s=0.5,
    measure_interval_s=0.05,
    squeeze_s=0.1,
    relax_s=0.2,
    creep_s=0.4,
    recycle_gap_s=0.2,
    residency_s=0.5,
)
# A scripted worker holds about 25 MiB.
SHARE = 64


@pytest.fixture
def home() -> Iterator[Path]:
    with short_home() as path:
        yield path


class SmallMachine(ThisMachine):
    """This one, with as little left as the test says."""

    left = 1 << 40

    def available(self) -> int:
        return self.left


def shared(home: Path, names: str, places: float, *, max_loaded: int = 0, **fields: object) -> Config:
    """Models of one size, and a budget for `places` of them."""
    made = config(home, names.split(), **({"memory_bytes": SHARE * MIB} | fields))
    memory = MemoryConfig(int(places * SHARE * MIB), max_loaded)
    return replace(made, memory=memory)


def running(config: Config, *options: str) -> Running:
    return Running(config, *options, limits=QUICK)


def resident(pool: Running) -> set[str]:
    return {view.name for view in pool.pool.workers() if view.state is State.READY}


async def had_its_turn(r: Running, name: str) -> None:
    ready_at = r.pool.worker(name).process.ready_at
    await until(lambda: time.monotonic() - ready_at > QUICK.residency_s)


async def test_the_least_recently_used_model_leaves_for_a_new_one(home: Path) -> None:
    async with running(shared(home, "a b c", 2.5)) as r:
        for name in ("a", "b", "a"):
            await r.complete(name)
        await had_its_turn(r, "b")
        await r.complete("c")
        assert resident(r) == {"a", "c"}
        assert r.events.evictions == [("b", "memory")]
        assert r.events.swaps == ["c"]
        assert r.events.returns == [1.0]
        assert r.pool.broker.view().granted_bytes == 2 * SHARE * MIB


async def test_a_model_that_can_never_fit_is_refused_at_once_with_the_numbers(home: Path) -> None:
    async with running(shared(home, "a", 0.5)) as r:
        with pytest.raises(ModelUnavailable) as caught:
            await r.ready("a")
        assert caught.value.failure.code is Code.DOES_NOT_FIT
        assert not caught.value.failure.is_retryable
        assert caught.value.retry_after_s == 0
        assert "it needs 64 MiB, and the memory budget is 32 MiB" in caught.value.failure.message
        assert r.pool.worker("a").state is State.STOPPED


async def test_a_pinned_model_stays_and_who_does_not_fit_beside_it_is_told_so(home: Path) -> None:
    async with running(shared(home, "a b", 1.5)) as r:
        await r.pool.pin("a")
        await r.complete("a")
        with pytest.raises(ModelUnavailable) as caught:
            await r.ready("b")
        assert "64 MiB of it for pinned models (a)" in caught.value.failure.message
        assert resident(r) == {"a"}
        await r.pool.unpin("a")
        await r.complete("b")
        assert resident(r) == {"b"}


async def test_no_more_models_are_loaded_than_the_operator_allows(home: Path) -> None:
    async with running(shared(home, "a b c", 100, max_loaded=1)) as r:
        for name in ("a", "b", "c", "a"):
            await r.complete(name)
            assert resident(r) == {name}
        assert r.events.evictions == [("a", "memory"), ("b", "memory"), ("c", "memory")]


async def test_a_model_that_nobody_asks_for_is_unloaded_after_its_time(home: Path) -> None:
    async with running(shared(home, "a", 2, ttl_s=0.1)) as r:
        worker = await r.ready("a")
        with r.pool.broker.lease("a"):
            stream = r.generate(worker, max_tokens=150)
            await read_all(stream)
            assert worker.state is State.READY, "it was busy for many times as long"
        await until(lambda: worker.state is State.STOPPED)
        assert r.events.evictions == [("a", "ttl")]
        await r.complete("a")


@pytest.mark.soak
async def test_what_runs_is_finished_while_new_requests_wait_and_nobody_is_lost(home: Path) -> None:
    async with running(shared(home, "a b", 1.5)) as r:
        first = await r.ready("a")
        may_end = home / "may_end"
        long = r.generate(first, f"hold {may_end}", max_tokens=100)
        begun = await long.read_deltas()
        other = asyncio.create_task(r.complete("b", max_tokens=3))
        await until(lambda: not first.is_ready)
        assert first.state is State.READY, "it still runs"
        late = asyncio.create_task(r.complete("a", max_tokens=3))
        may_end.touch()
        assert text_of(begun + await read_all(long)) == tokens(100)
        assert finish_of(await other) is Finish.LENGTH
        assert finish_of(await late) is Finish.LENGTH
        assert first.epoch == 3
        assert r.events.evictions == [("a", "memory"), ("b", "memory")]


@pytest.mark.soak
async def test_a_gate_opens_again_when_nobody_waits_any_more(home: Path) -> None:
    async with running(shared(home, "a b", 1.5)) as r:
        worker = await r.ready("a")
        may_end = home / "may_end"
        long = r.generate(worker, f"hold {may_end}", max_tokens=100)
        waiting = asyncio.create_task(r.pool.ensure_ready("b"))
        await until(lambda: not worker.is_ready)
        late = asyncio.create_task(r.complete("a", max_tokens=3))
        waiting.cancel()
        assert finish_of(await late) is Finish.LENGTH
        assert worker.epoch == 1
        may_end.touch()
        assert text_of(await read_all(long)) == tokens(100)


async def test_a_loan_is_called_back_before_a_model_is_unloaded(home: Path) -> None:
    # The demo model's floor is 0.9 GiB: three fit into 4 GiB, of which the first gets half of the rest as well.
    async with running(shared(home, "a b c", 64, memory_bytes="auto")) as r:
        first = await r.ready("a")
        alone = r.pool.broker.view().models["a"]
        assert alone.share_bytes > alone.floor_bytes
        for name in ("b", "c"):
            await r.complete(name)
        memory = r.pool.broker.view()
        assert resident(r) == {"a", "b", "c"}
        assert r.events.evictions == []
        assert memory.granted_bytes <= memory.budget_bytes
        assert memory.models["a"].share_bytes < alone.share_bytes
        assert first.stats is not None
        assert first.stats.granted_bytes == memory.models["a"].share_bytes


async def test_a_worker_that_grows_is_asked_for_less_and_at_last_started_anew_without_losing_a_stream(
    home: Path,
) -> None:
    async with running(shared(home, "a", 10)) as r:
        worker = await r.ready("a")
        may_end = home / "may_end"
        with r.pool.broker.lease("a"):
            stream = r.generate(worker, f"hold {may_end}", max_tokens=100)
            begun = await stream.read_deltas()
            r.generate(worker, "grow 140", max_tokens=3)
            await until(lambda: worker.epoch == 2 and worker.is_ready, 60)
            may_end.touch()
            deltas: list[Delta] = begun + await read_all(stream)
        assert text_of(deltas) == tokens(100)
        assert finish_of(deltas) is Finish.LENGTH
        assert r.events.trims[0] == "a"
        assert r.events.recycles == ["a"]
        assert (worker.epoch, worker.restart_policy.restarts) == (2, 0)


async def test_a_short_machine_refuses_new_requests_at_last_and_takes_them_again(home: Path) -> None:
    machine = SmallMachine()
    async with Running(shared(home, "a", 10), limits=QUICK, machine=machine) as r:
        worker = await r.ready("a")
        stream = r.generate(worker, max_tokens=250)
        machine.left = 0
        await until(lambda: worker.process.overload is not None, 30)
        (refused,) = await read_all(r.generate(worker))
        assert refused.failure is not None
        assert refused.failure.code is Code.OUT_OF_MEMORY
        assert refused.failure.is_retryable
        assert r.events.refusals == ["a"]
        machine.left = 1 << 40
        assert finish_of(await read_all(stream)) is Finish.LENGTH
        await r.pool.restart("a")
        assert worker.process.overload is None, "another process, another memory"


@pytest.mark.soak
async def test_continuous_traffic_on_two_models_does_not_starve_a_third(home: Path) -> None:
    async with running(shared(home, "a b c", 2.5)) as r:
        counts = dict.fromkeys("ab", 0)

        async def traffic(name: str) -> None:
            while True:
                with r.pool.broker.lease(name):
                    assert finish_of(await r.complete(name, max_tokens=10)) is Finish.LENGTH
                counts[name] += 1

        clients = [asyncio.create_task(traffic(name)) for name in "aabb"]
        await until(lambda: min(counts.values()) > 2)
        for _ in range(3):
            async with asyncio.timeout(patient(DEADLINE_S)):
                await r.complete("c", max_tokens=3)
            before = dict(counts)
            await until(lambda before=before: all(counts[name] > before[name] for name in counts))
        for client in clients:
            assert not client.done()
            client.cancel()
        await asyncio.wait(clients)


@pytest.mark.soak
async def test_a_crash_gives_its_memory_back(home: Path) -> None:
    async with running(shared(home, "a b", 1.5)) as r:
        worker = await r.ready("a")
        await until(lambda: r.pool.broker.view().models["a"].footprint_bytes > 0)
        os.kill(worker.pid, signal.SIGKILL)
        await r.complete("b")
        assert resident(r) == {"b"}
        assert r.events.returns == [1.0]


async def test_a_lowered_limit_is_kept_also_when_nobody_asks_for_anything(home: Path) -> None:
    before = shared(home, "a b", 100)
    async with running(before) as r:
        for name in ("a", "b"):
            await r.complete(name)
        await had_its_turn(r, "b")
        r.pool.apply(replace(before, memory=MemoryConfig(100 * SHARE * MIB, max_loaded=1)))
        await until(lambda: resident(r) == {"b"})
        r.pool.apply(replace(before, memory=MemoryConfig(SHARE * MIB // 2)))
        await until(lambda: resident(r) == set())
