"""A share of memory and its uses, and a worker that is told another share while it runs."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx

from protocol.messages import Finish, Generate, Sampling, SetMemory, Step, TextPrompt
from protocol.spec import WorkerSpec
from tests.support.process import Gateway
from worker.memory import Share, divide

MIB = 1 << 20
GIB = 1 << 30


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
    assert (limits.kv, limits.prefixes, limits.total) == (0, 0, 2 * GIB)


def test_without_a_share_the_machine_is_the_limit() -> None:
    limits = Share(WorkerSpec("m", "p", 1, "d", "u", kv_bytes=7, cache_bytes=8), 0).enforce()
    assert (limits.kv, limits.prefixes, limits.total) == (7, 8, 0)


def test_enforcing_sets_what_somebody_else_has_set_otherwise() -> None:
    default = mx.set_memory_limit(1 << 40)
    try:
        share = Share(WorkerSpec("m", "p", 1, "d", "u", memory_bytes=4 * GIB), GIB)
        limits = share.enforce()
        assert mx.set_cache_limit(0) == limits.buffers
        assert mx.set_memory_limit(1 << 40) == limits.total
        # What Python holds has changed a little since.
        again = share.enforce()
        assert mx.set_cache_limit(again.buffers) == again.buffers > 0
        smaller = share.change(SetMemory(2 * GIB))
        assert smaller.kv < limits.kv
        assert share.bytes == 2 * GIB
        assert mx.set_memory_limit(1 << 40) == smaller.total < limits.total
    finally:
        mx.set_memory_limit(default)


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
        assert before.share_bytes == GIB

        def squeeze() -> None:
            # What is left for KV holds about two of the six rows.
            part = 2 * 2**20 / before.kv_limit
            gateway.send(SetMemory(GIB, part, 0.0))

        found = answers(gateway, prompts, first_rid=101, amid=squeeze)
        after = gateway.pong(2).stats

        assert found == expected
        assert after.kv_limit < 3 * MIB < before.kv_limit
        assert after.preemptions > 0
        assert after.cache_bytes == 0


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
