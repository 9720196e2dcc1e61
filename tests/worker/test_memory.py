"""A share of memory and its uses, and a worker that is told another share while it runs."""

import mlx.core as mx

from protocol.messages import SetMemory, WorkerSpec
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
