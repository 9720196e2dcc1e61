"""A grant of memory and its uses, and a worker that gets another grant while it runs."""

import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from protocol.from_worker import Finish, Step
from protocol.spec import GroupSpec, RankSpec, WorkerSpec
from protocol.to_worker import Abort, Generate, Sampling, SetMemory, TextPrompt, TokensPrompt
from tests.support import disk
from tests.support.engine import EngineHarness, spec
from tests.support.models import Breakable
from tests.support.prefix_checks import check_cache
from tests.support.process import Gateway
from tests.support.scale import patient, scaled
from worker.engine.generator import Generator
from worker.errors import StepFailed
from worker.model.memory import AllocationLimits, MemoryGrant, divide
from worker.prefix_cache.cache_and_eviction import PrefixCache
from worker.prefix_cache.disk import CacheDisk
from worker.sampling.logprobs import LogprobReader

MIB = 1 << 20
GIB = 1 << 30
# Far more than the process of the tests takes, which grows with each test before.
_SHARE_BYTES = 16 * GIB


def test_what_weights_and_python_leave_is_divided_among_kv_prefixes_and_buffers() -> None:
    limits = divide(SetMemory(10 * GIB), weights=4 * GIB, host=100 * MIB)
    assert 0 < limits.buffers <= GIB
    assert limits.kv == 3 * (limits.kv + limits.prefixes) // 4
    assert 5.8 * GIB < limits.kv + limits.prefixes + limits.buffers <= 6 * GIB - 100 * MIB
    assert limits.total == 10 * GIB - 100 * MIB


def test_the_operators_numbers_are_kept_and_the_rest_is_divided() -> None:
    assert divide(SetMemory(10 * GIB), 4 * GIB, 0, kv=GIB).kv == GIB
    both = divide(SetMemory(10 * GIB), 4 * GIB, 0, kv=GIB, prefixes=2 * GIB)
    assert (both.kv, both.prefixes) == (GIB, 2 * GIB)
    rest = divide(SetMemory(10 * GIB), 4 * GIB, 0, prefixes=0)
    assert rest.prefixes == 0
    assert rest.kv > 4 * GIB


def test_under_pressure_a_part_is_left_unused() -> None:
    calm, pressed = (divide(SetMemory(10 * GIB, *parts), 4 * GIB, 0) for parts in ((1.0, 1.0), (0.5, 0.25)))
    assert pressed.kv == calm.kv // 2
    assert pressed.prefixes == calm.prefixes // 4


def test_a_share_that_is_too_small_leaves_nothing_and_is_not_negative() -> None:
    limits = divide(SetMemory(GIB), 2 * GIB, 100 * MIB)
    assert (limits.kv, limits.prefixes, limits.total) == (0, 0, 2 * GIB + limits.buffers)


@given(
    st.integers(0, 64), st.integers(0, 64), st.integers(-1, 64), st.integers(-1, 64), st.sampled_from([1.0, 0.5, 0.25])
)
def test_mlx_may_allocate_all_that_is_counted_and_what_passes(
    grant: int, weights: int, kv: int, prefixes: int, part: float
) -> None:
    order = SetMemory(grant * GIB, part, part)
    limits = divide(order, weights * GIB, 100 * MIB, kv=kv * GIB, prefixes=prefixes * GIB)
    assert limits.total >= weights * GIB + limits.kv + limits.prefixes + limits.buffers


def test_without_a_share_the_machine_is_the_limit() -> None:
    limits = MemoryGrant(WorkerSpec("m", "p", 1, "d", "u", kv_bytes=7, cache_bytes=8), 0).limits()
    assert (limits.kv, limits.prefixes, limits.total) == (7, 8, 0)


def elsewhere(size_bytes: int, **settings: int) -> MemoryGrant:
    """The share of a rank on another machine, with so many bytes there, and 2 GiB of weights."""
    rank = RankSpec(1, "plan", "watch", "server", "public", "secret")
    group = GroupSpec(("local", "studio2"), "pipeline", "ring")
    spec = WorkerSpec("m", "p", 1, "d", "u", memory_bytes=size_bytes, group=group, rank=rank)
    return MemoryGrant(structs.replace(spec, **settings), 2 * GIB)


def test_the_memory_of_a_rank_on_another_machine_is_its_own_whatever_share_rank_0_has() -> None:
    grant = elsewhere(8 * GIB)
    own = grant.limits()
    for order in (SetMemory(0), SetMemory(1 << 50), SetMemory(GIB), SetMemory(8 * GIB, 7.0, math.nan)):
        changed = grant.change(order)
        assert grant.bytes == 8 * GIB
        assert changed.total <= 8 * GIB
        assert changed.kv <= own.kv
    pressed = grant.change(SetMemory(GIB, 0.5, 0.25))
    assert pressed.kv == pytest.approx(own.kv / 2, rel=0.1)


@pytest.mark.parametrize(("kv", "prefixes"), [(1 << 50, -1), (-1, 1 << 50), (1 << 50, 1 << 50), (2 * GIB, 1 << 50)])
def test_kv_and_prefixes_take_no_more_than_what_is_given_on_another_machine(kv: int, prefixes: int) -> None:
    limits = elsewhere(8 * GIB, kv_bytes=kv, cache_bytes=prefixes).limits()
    assert limits.total <= 8 * GIB
    assert 2 * GIB + limits.kv + limits.prefixes + limits.buffers <= 8 * GIB


def test_enforcing_sets_what_somebody_else_has_set_otherwise() -> None:
    default = mx.set_memory_limit(1 << 40)
    try:
        grant = MemoryGrant(WorkerSpec("m", "p", 1, "d", "u", memory_bytes=4 * GIB), GIB)
        limits = grant.limits()
        grant.enforce(limits)
        assert mx.set_cache_limit(0) == limits.buffers
        assert mx.set_memory_limit(1 << 40) == limits.total
        grant.enforce(limits)
        assert mx.set_cache_limit(limits.buffers) == limits.buffers > 0
        smaller = grant.change(SetMemory(2 * GIB))
        assert smaller.kv < limits.kv
        assert grant.bytes == 2 * GIB
        assert mx.set_memory_limit(1 << 40) == limits.total, "not before it is enforced"
        grant.enforce(smaller)
        assert mx.set_memory_limit(1 << 40) == smaller.total < limits.total
    finally:
        mx.set_memory_limit(default)


class Metal:
    """A device that writes down what it is told. `held` is what is allocated; a step under way holds more."""

    def __init__(self, held: int) -> None:
        self.held = held
        self.of_step = 0
        self.told: list[str] = []
        self.wired = 0

    def wirable(self) -> int:
        return 64 * GIB

    def active(self) -> int:
        return self.held + self.of_step

    def synchronize(self) -> None:
        self.told.append("synchronize")
        self.of_step = 0

    def clear_cache(self) -> None:
        self.told.append("clear cache")

    def set_cache_limit(self, limit: int) -> None:
        self.told.append("cache limit")

    def set_memory_limit(self, limit: int) -> None:
        self.told.append("memory limit")

    def set_wired_limit(self, limit: int) -> None:
        self.told.append("wired limit")
        self.wired = limit


def wired(limits: AllocationLimits) -> int:
    return GIB + limits.kv + limits.prefixes + limits.buffers


def share_of(metal: Metal) -> MemoryGrant:
    grant = MemoryGrant(WorkerSpec("m", "p", 1, "d", "u", memory_bytes=8 * GIB), GIB, metal)
    limits = grant.limits()
    grant.enforce(limits)
    assert metal.wired == grant.wired_limit == wired(limits)
    metal.told.clear()
    return grant


def test_what_nobody_uses_goes_before_the_wired_limit_falls_and_no_step_meets_its_change() -> None:
    metal = Metal(held=2 * GIB)
    grant = share_of(metal)
    limits = grant.change(SetMemory(4 * GIB))
    assert metal.told == []
    grant.enforce(limits)
    assert metal.told == ["clear cache", "cache limit", "memory limit", "synchronize", "wired limit"]
    assert metal.wired == wired(limits) < 4 * GIB
    metal.told.clear()
    grant.check()
    assert metal.told == []


def test_the_wired_limit_never_falls_below_what_is_held() -> None:
    """Else Metal would choose which allocations stay wired, and might choose none of the weights."""
    metal = Metal(held=6 * GIB)
    grant = share_of(metal)
    before = metal.wired
    limits = grant.change(SetMemory(4 * GIB))
    grant.enforce(limits)
    grant.check()
    assert metal.wired == grant.wired_limit == before
    metal.held, metal.of_step = 2 * GIB, 4 * GIB
    grant.check()
    assert metal.wired == grant.wired_limit == wired(limits)
    assert metal.told[-2:] == ["synchronize", "wired limit"]


def test_a_failed_allocation_halves_kv_and_prefixes_three_times_and_time_gives_them_back() -> None:
    grant = MemoryGrant(WorkerSpec("m", "p", 1, "d", "u", memory_bytes=8 * GIB, kv_bytes=GIB), GIB, Metal(0))
    seen = [grant.limits().kv]
    while grant.shrink(now=100.0):
        seen.append(grant.limits().kv)
    assert seen == [GIB, GIB // 2, GIB // 4, GIB // 8]
    assert not grant.relax(now=399.0)
    assert grant.relax(now=400.0)
    assert grant.limits().kv == GIB // 4
    assert not grant.relax(now=699.0)
    assert [grant.relax(now=at) for at in (700.0, 1000.0, 1300.0)] == [True, True, False]
    assert grant.limits().kv == GIB


def test_prefixes_are_let_go_of_before_mlx_hears_of_a_smaller_share(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[tuple[int, int]] = []
    with EngineHarness(spec(model_folder("qwen3"), memory_bytes=_SHARE_BYTES)) as engine:
        engine.run([Generate(1, TokensPrompt(tuple(range(20, 320))), Sampling(temperature=0.0), max_tokens=2)])
        cache = engine.engine.cache

        def enforce(_: MemoryGrant, limits: AllocationLimits) -> None:
            held.append((cache.nbytes, limits.prefixes))

        assert cache.nbytes > 0
        monkeypatch.setattr(MemoryGrant, "enforce", enforce)
        engine.command(SetMemory(_SHARE_BYTES, 1.0, 0.0))
        engine.run([Generate(2, TokensPrompt((20,)), Sampling(temperature=0.0), max_tokens=1)])
    assert held == [(0, 0)]


@pytest.mark.parametrize(
    "words",
    [
        *scaled(["[metal::malloc] Resource limit (499000) exceeded."], []),
        "[malloc] Unable to allocate 1073741824 bytes.",
        "[METAL] Command buffer execution failed: Insufficient Memory (kIOGPUCommandBufferCallbackErrorOutOfMemory)",
    ],
)
def test_a_step_that_finds_no_memory_is_tried_again_with_a_smaller_batch(
    words: str, model_folder: Callable[[str], Path]
) -> None:
    batch = [
        Generate(rid, TokensPrompt(tuple(range(20 * rid, 20 * rid + 60))), Sampling(temperature=0.0), max_tokens=24)
        for rid in range(1, 5)
    ]
    with EngineHarness(spec(model_folder("qwen3")), wrap=Breakable) as engine:
        alone = [engine.run([request])[0].ids for request in batch]
        room = engine.kv_cost.bytes(4, 256)
    with EngineHarness(spec(model_folder("qwen3"), kv_bytes=room), wrap=Breakable) as engine:
        assert engine.gauges.kv_limit == room
        results = [engine.submit(request) for request in batch]
        engine.wait(lambda: all(result.ids for result in results), "all rows to run")
        engine.loaded.model.words, engine.loaded.model.faults = words, 1
        engine.wait(lambda: all(result.terminals for result in results), "all ends")
        assert engine.gauges.kv_limit == room // 2
        assert engine.gauges.snapshot().allocation_failures == 1
        engine.loaded.model.faults = 2
        assert [result.ids for result in engine.run(batch[:2])] == alone[:2]
        assert engine.gauges.kv_limit == room // 8
        # With nothing left to give it ends the worker, as any failure does that comes again at once.
        engine.loaded.model.faults = 2
        assert engine.run(batch[:1])[0].failure is not None
        assert isinstance(engine.error, StepFailed)
    assert [result.ids for result in results] == alone


@pytest.mark.parametrize("act", ["fetch", "store"])
def test_a_row_that_joins_or_leaves_without_memory_for_a_prefix_costs_no_other_its_tokens(
    act: str, model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def request(rid: int, max_tokens: int) -> Generate:
        prompt = TokensPrompt(tuple(range(20 * rid, 20 * rid + 90)))
        return Generate(rid, prompt, Sampling(temperature=0.0, ignore_eos=True), max_tokens)

    batch, late, leaving = [request(1, 80), request(2, 80)], request(3, 4), request(4, 3000)
    with EngineHarness(spec(model_folder("qwen3"))) as engine:
        alone = [engine.run([each])[0].ids for each in (*batch, late)]
        cache, original, calls = engine.engine.cache, getattr(PrefixCache, act), 0

        def failing_once(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 1:
                raise RuntimeError("[malloc] Unable to allocate 1073741824 bytes.")
            return original(*args, **options)

        results = [engine.submit(each) for each in (*batch, leaving)]
        engine.wait(lambda: all(result.ids for result in results), "all rows to run")
        monkeypatch.setattr(PrefixCache, act, failing_once)
        engine.command(Abort((leaving.rid,)))
        results.insert(2, engine.submit(late))
        engine.wait(lambda: engine.error is not None or all(result.terminals for result in results), "all ends")
        assert calls > 0
        assert engine.error is None
        check_cache(cache)
    assert [result.terminals for result in results] == [1, 1, 1, 1]
    assert results.pop().finish is Finish.ABORT
    assert [result.ids for result in results] == alone


@pytest.mark.parametrize(
    ("part", "act"), [(Generator, "extract"), (LogprobReader, "read"), (CacheDisk, "write"), (PrefixCache, "resize")]
)
def test_what_finds_no_memory_beside_the_step_ends_no_worker_and_changes_no_token(
    part: type, act: str, model_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def request(rid: int, max_tokens: int) -> Generate:
        prompt = TokensPrompt(tuple(range(20 * rid, 20 * rid + 90)))
        return Generate(rid, prompt, Sampling(temperature=0.0, ignore_eos=True), max_tokens, top_logprobs=1)

    batch, short, leaving = [request(1, 80), request(2, 80)], request(3, 4), request(4, 3000)
    settings = {
        "disk_cache_dir": str(tmp_path),
        "disk_cache_bytes": GIB,
        "disk_cache_tokens": 64,
        "memory_bytes": _SHARE_BYTES,
    }
    with EngineHarness(spec(model_folder("qwen3"))) as engine:
        alone = [engine.run([each])[0].ids for each in (*batch, short)]
    with EngineHarness(spec(model_folder("qwen3"), **settings)) as engine:
        original, calls = getattr(part, act), 0

        def failing_once(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == 1:
                raise RuntimeError("[malloc] Unable to allocate 1073741824 bytes.")
            return original(*args, **options)

        results = [engine.submit(each) for each in (*batch, short, leaving)]
        engine.wait(lambda: all(result.ids for result in results), "all rows to run")
        monkeypatch.setattr(part, act, failing_once)
        engine.command(SetMemory(_SHARE_BYTES, 0.5, 0.25))
        engine.command(Abort((leaving.rid,)))
        engine.wait(lambda: engine.error is not None or all(result.terminals for result in results), "all ends")
        assert engine.error is None
        # What could not be handed to the disk then can be later.
        again = engine.run([request(1, 80)])[0]
        assert engine.error is None
    assert calls > 0
    assert disk.files(tmp_path)
    assert [result.terminals for result in results] == [1, 1, 1, 1]
    assert results.pop().finish is Finish.ABORT
    assert [*(result.ids for result in results), again.ids] == [*alone, alone[0]]


@pytest.mark.soak
def test_a_smaller_share_makes_running_rows_wait_for_each_other_and_changes_no_token(
    model_folder: Callable[[str], Path],
) -> None:
    prompts = ["ka to mi ra sen " * (2 + i) for i in range(6)]
    with (
        tempfile.TemporaryDirectory(prefix="mlxd-", dir="/tmp") as home,
        Gateway(Path(home), model_folder("qwen3"), memory_bytes=GIB, disk_cache_dir="") as gateway,
    ):
        gateway.ready()
        expected = answers(gateway, prompts, first_rid=1)
        before = gateway.pong(1).stats
        assert before.granted_bytes == GIB

        def squeeze() -> None:
            # What is left for KV holds about two of the six rows.
            part = 2 * 2**20 / before.kv_limit
            gateway.send(SetMemory(GIB, part, 0.0))

        found = answers(gateway, prompts, first_rid=101, amid=squeeze)
        after = gateway.pong(2).stats

        assert found == expected
        assert after.kv_limit < 3 * MIB < before.kv_limit
        assert after.preemptions > 0

        # Steps fill free buffers, within their limit; a smaller share gives them back.
        assert after.cache_bytes > 0
        gateway.send(SetMemory(GIB // 2, 1.0, 0.0))
        end = time.monotonic() + patient(10)
        while (stats := gateway.pong(3).stats).granted_bytes != GIB // 2 or stats.cache_bytes:
            assert time.monotonic() < end, f"{stats.cache_bytes} bytes of free buffers are kept"
            time.sleep(0.02)


def answers(
    gateway: Gateway, prompts: list[str], first_rid: int, amid: Callable[[], None] = lambda: None
) -> list[list[int]]:
    """The tokens of each prompt; `amid` is called when all rows have begun."""
    rids = range(first_rid, first_rid + len(prompts))
    for rid, prompt in zip(rids, prompts, strict=True):
        sampling = Sampling(temperature=0.0, ignore_eos=True)
        gateway.send(Generate(rid, TextPrompt(prompt), sampling, max_tokens=350))
    found: dict[int, list[int]] = {rid: [] for rid in rids}
    ended: set[int] = set()
    is_told = False
    while len(ended) < len(prompts):
        step = gateway.expect(Step)
        for delta in step.deltas:
            found[delta.rid] += delta.token_ids
            if delta.finish is not None:
                assert delta.finish is Finish.LENGTH
                ended.add(delta.rid)
        if not is_told and all(found.values()):
            amid()
            is_told = True
    return list(found.values())
