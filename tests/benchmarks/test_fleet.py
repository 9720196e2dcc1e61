"""The simulation of a fleet: mlxd's rule keeps conversations warm, and has no ruinous tail where hashing has one."""

from benchmarks.fleet import POLICIES, simulate


def figures(name: str, chats: int) -> tuple[float, float]:
    part, waits, _ = simulate(POLICIES[name](), 4, chats, 1600, seed=3)
    return part, waits[int(0.99 * len(waits))]


def test_conversations_stay_where_they_are_warm() -> None:
    cached, _ = figures("mlxd", 12)
    by_load, _ = figures("least loaded", 12)
    assert cached > 0.85
    assert by_load < 0.7


def test_in_overload_nobody_waits_as_long_as_behind_a_full_hash() -> None:
    _, tail = figures("mlxd", 20)
    _, hashed = figures("hash", 20)
    assert tail < hashed / 2
