"""The memory policy: single decisions, and invariants that hold in every generated history."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.workers.memory.policy import (
    PATIENCE_S,
    EvictionTerms,
    LoadClaim,
    MemoryPlan,
    ModelSnapshot,
    plan,
    relieve,
)

NOW = 1000.0


def claim(name: str, floor: int, *, least: int | None = None, most: int | None = None) -> LoadClaim:
    return LoadClaim(name, floor if least is None else least, floor, floor if most is None else most)


def tenant(
    name: str,
    memory_bytes: int,
    *,
    floor: int | None = None,
    is_ready: bool = True,
    is_busy: bool = False,
    is_pinned: bool = False,
    gated_at: float | None = None,
    shrinking_to: int | None = None,
    ready_at: float = 0.0,
    used_at: float = 0.0,
) -> ModelSnapshot:
    own = memory_bytes if floor is None else floor
    return ModelSnapshot(
        name, memory_bytes, own, is_ready, is_busy, is_pinned, gated_at, shrinking_to, ready_at, used_at
    )


def decide(
    claims: list[LoadClaim], tenants: list[ModelSnapshot], budget: int, now: float = NOW, **terms: float
) -> MemoryPlan:
    return plan(claims, tenants, EvictionTerms(budget, **terms), now)  # type: ignore[arg-type]


# -- granting --------------------------------------------------------------------------------------------------------


def test_what_fits_is_granted_at_once() -> None:
    made = decide([claim("a", 40)], [tenant("b", 60)], 100)
    assert made == MemoryPlan(grants=[("a", 40)])


def test_half_of_what_nobody_needs_is_lent() -> None:
    assert decide([claim("a", 20, most=1000)], [], 100).grants == [("a", 60)]
    assert decide([claim("a", 20, most=30)], [], 100).grants == [("a", 30)]


def test_what_the_machine_does_not_have_is_not_lent() -> None:
    assert decide([claim("a", 20, most=1000)], [], 100, available=40).grants == [("a", 30)]
    assert decide([claim("a", 20, most=1000)], [], 100, available=0).grants == [("a", 20)]


def test_nothing_is_lent_that_the_next_in_the_queue_needs() -> None:
    made = decide([claim("a", 20, most=1000), claim("b", 70, most=1000)], [], 100)
    assert made.grants == [("a", 25), ("b", 72)]


def test_memory_that_is_not_back_yet_is_not_granted() -> None:
    assert decide([claim("a", 50)], [], 100, returning=60) == MemoryPlan()
    assert decide([claim("a", 50)], [], 100, returning=50).grants == [("a", 50)]


def test_a_model_gets_less_than_it_would_like_where_it_could_never_have_that() -> None:
    made = decide([claim("a", 90, least=30)], [tenant("p", 40, is_pinned=True)], 100)
    assert made.grants == [("a", 60)]


# -- making room -----------------------------------------------------------------------------------------------------


def test_the_least_recently_used_idle_model_leaves() -> None:
    tenants = [tenant("old", 50, used_at=10), tenant("new", 50, used_at=20)]
    assert decide([claim("a", 40)], tenants, 100) == MemoryPlan(evictions=["old"])


def test_nobody_leaves_who_would_not_be_enough() -> None:
    tenants = [tenant("small", 20, used_at=10), tenant("large", 60, used_at=20), tenant("busy", 20, is_busy=True)]
    made = decide([claim("a", 60)], tenants, 100)
    assert made.evictions == ["large"], "the small one leaves for nothing"


def test_an_idle_model_leaves_before_a_busy_one_is_gated() -> None:
    tenants = [tenant("busy", 50, is_busy=True, used_at=10), tenant("idle", 50, used_at=20)]
    assert decide([claim("a", 40)], tenants, 100) == MemoryPlan(evictions=["idle"])


def test_the_gate_of_the_longest_loaded_busy_model_is_closed() -> None:
    tenants = [tenant("b", 50, is_busy=True, ready_at=20), tenant("c", 50, is_busy=True, ready_at=10)]
    assert decide([claim("a", 40)], tenants, 100) == MemoryPlan(gated={"c"})


def test_a_gated_model_that_does_not_end_is_left_alone_for_another() -> None:
    tenants = [
        tenant("b", 50, is_busy=True, ready_at=20),
        tenant("slow", 50, is_busy=True, ready_at=10, gated_at=NOW - PATIENCE_S),
    ]
    assert decide([claim("a", 40)], tenants, 100).gated == {"b"}
    made = decide([claim("a", 40)], tenants, 100, now=NOW - 1)
    assert (made.gated, made.wake_at) == ({"slow"}, NOW)


def test_neither_pinned_nor_loading_models_leave() -> None:
    tenants = [tenant("pinned", 50, is_pinned=True), tenant("loading", 50, is_ready=False)]
    assert decide([claim("a", 40)], tenants, 100) == MemoryPlan()


def test_a_model_within_its_residency_stays_and_the_plan_says_when_to_ask_again() -> None:
    tenants = [tenant("b", 50, ready_at=NOW - 4), tenant("c", 50, ready_at=NOW - 2)]
    assert decide([claim("a", 40)], tenants, 100, min_residency_s=10) == MemoryPlan(wake_at=NOW + 6)


def test_loans_are_called_before_anybody_leaves() -> None:
    tenants = [tenant("b", 60, floor=30, used_at=20), tenant("c", 40, floor=30, used_at=10)]
    assert decide([claim("a", 35)], tenants, 100) == MemoryPlan(shrinks=[("c", 30), ("b", 35)])


def test_memory_on_its_way_is_not_asked_for_twice() -> None:
    tenants = [tenant("b", 60, floor=30, shrinking_to=30), tenant("c", 40, used_at=10)]
    assert decide([claim("a", 30)], tenants, 100) == MemoryPlan()
    assert decide([claim("a", 50)], [tenant("c", 40)], 100, returning=60, exiting=1) == MemoryPlan()


def test_with_room_enough_max_loaded_still_makes_one_leave() -> None:
    tenants = [tenant("b", 10, used_at=20), tenant("c", 10, used_at=10)]
    assert decide([claim("a", 10)], tenants, 100, max_loaded=2) == MemoryPlan(evictions=["c"])
    assert decide([claim("a", 10)], tenants[:1], 100, max_loaded=2, exiting=1, returning=10) == MemoryPlan()


# -- the queue -------------------------------------------------------------------------------------------------------


def test_a_small_model_passes_with_memory_that_the_first_could_not_use() -> None:
    tenants = [tenant("b", 80, is_busy=True)]
    made = decide([claim("large", 80), claim("small", 15)], tenants, 100)
    assert made == MemoryPlan(grants=[("small", 15)], gated={"b"})


def test_a_small_model_does_not_pass_with_memory_that_the_first_waits_for() -> None:
    tenants = [tenant("b", 60, is_busy=True)]
    assert decide([claim("large", 80), claim("small", 30)], tenants, 100) == MemoryPlan(gated={"b"})


def test_room_is_made_for_one_model_at_a_time() -> None:
    tenants = [tenant("b", 50, used_at=10), tenant("c", 50, used_at=20)]
    assert decide([claim("first", 50), claim("second", 50)], tenants, 100) == MemoryPlan(evictions=["b"])


def test_a_gate_that_nobody_needs_closed_is_not_in_the_plan() -> None:
    assert decide([], [tenant("b", 60, is_busy=True, gated_at=1.0)], 100) == MemoryPlan()


# -- never -----------------------------------------------------------------------------------------------------------


def test_what_is_larger_than_the_budget_is_refused_at_once() -> None:
    made = decide([claim("a", 300, least=101), claim("b", 50)], [], 100)
    assert [(never.name, never.need, never.cap, never.pinned) for never in made.infeasible] == [("a", 101, 100, ())]
    assert made.grants == [("b", 50)]


def test_what_does_not_fit_beside_the_pinned_is_refused_with_their_names() -> None:
    made = decide([claim("a", 60)], [tenant("p", 50, is_pinned=True), tenant("b", 50)], 100)
    (never,) = made.infeasible
    assert (never.cap, never.pinned, never.is_full) == (50, ("p",), False)
    assert not made.evictions


def test_pinned_models_that_fill_max_loaded_leave_no_hope() -> None:
    (never,) = decide([claim("a", 1)], [tenant("p", 5, is_pinned=True)], 100, max_loaded=1).infeasible
    assert never.is_full


def test_a_lowered_budget_takes_loans_back_and_then_unloads() -> None:
    tenants = [tenant("b", 60, floor=30, used_at=20), tenant("c", 40, used_at=10)]
    assert relieve(tenants, EvictionTerms(80), NOW) == MemoryPlan(shrinks=[("b", 40)])
    assert relieve(tenants, EvictionTerms(50), NOW) == MemoryPlan(evictions=["c"], shrinks=[("b", 50)])
    assert relieve(tenants, EvictionTerms(100), NOW) == MemoryPlan()
    assert relieve(tenants, EvictionTerms(100, max_loaded=1), NOW) == MemoryPlan(evictions=["c"])


# -- promises --------------------------------------------------------------------------------------------------------


@dataclass
class Resident:
    memory_bytes: int
    ready_at: float | None = None
    busy: int = 0
    used_at: float = 0.0
    gated_at: float | None = None
    shrinking_to: int | None = None
    is_leaving: bool = False


@dataclass
class World:
    """Models that are asked for, loaded and sent away; each round of `turn` is one look of the broker."""

    budget: int
    floors: dict[str, int]
    pinned: set[str]
    max_loaded: int
    residency_s: float
    now: float = 0.0
    asked: dict[str, float] = field(default_factory=dict[str, float])
    residents: dict[str, Resident] = field(default_factory=dict[str, Resident])
    refused: set[str] = field(default_factory=set[str])
    waits: list[float] = field(default_factory=list[float])

    def ask(self, name: str) -> None:
        home = self.residents.get(name)
        if home is not None and home.ready_at is not None and home.gated_at is None and not home.is_leaving:
            home.busy += 1
        elif home is None and name not in self.refused:
            self.asked.setdefault(name, self.now)

    def end(self, name: str) -> None:
        home = self.residents.get(name)
        if home is not None and home.busy:
            home.busy -= 1
            home.used_at = self.now

    def progress(self) -> None:
        """Loads get ready, shrinking is done, processes end."""
        for name, home in list(self.residents.items()):
            if home.is_leaving:
                del self.residents[name]
            elif home.ready_at is None:
                home.ready_at = home.used_at = self.now
            elif home.shrinking_to is not None:
                home.memory_bytes, home.shrinking_to = home.shrinking_to, None

    def turn(self) -> MemoryPlan:
        claims = [LoadClaim(n, self.floors[n], self.floors[n], 10 * self.budget) for n in self.asked]
        staying = {n: r for n, r in self.residents.items() if not r.is_leaving}
        leaving = [r for r in self.residents.values() if r.is_leaving]
        tenants = [
            tenant(
                name,
                home.memory_bytes,
                floor=min(home.memory_bytes, self.floors[name]),
                is_ready=home.ready_at is not None,
                is_busy=home.busy > 0,
                is_pinned=name in self.pinned,
                gated_at=home.gated_at,
                shrinking_to=home.shrinking_to,
                ready_at=home.ready_at or 0.0,
                used_at=home.used_at,
            )
            for name, home in staying.items()
        ]
        returning = sum(home.memory_bytes for home in leaving)
        terms = EvictionTerms(self.budget, self.max_loaded, self.residency_s, returning, len(leaving))
        made = plan(claims, tenants, terms, self.now)
        self.carry_out(made)
        return made

    def carry_out(self, made: MemoryPlan) -> None:
        for never in made.infeasible:
            self.refused.add(never.name)
            del self.asked[never.name]
        for name in made.evictions:
            home = self.residents[name]
            assert not home.busy
            assert name not in self.pinned
            assert home.ready_at is not None
            assert self.now - home.ready_at >= self.residency_s
            home.is_leaving = True
        for name, home in self.residents.items():
            if name in made.gated:
                assert home.busy
                assert name not in self.pinned
                assert home.ready_at is not None
                assert self.now - home.ready_at >= self.residency_s
                home.gated_at = self.now if home.gated_at is None else home.gated_at
            elif not home.is_leaving:
                home.gated_at = None
        for name, memory_bytes in made.shrinks:
            assert self.floors[name] <= memory_bytes < self.residents[name].memory_bytes
            self.residents[name].shrinking_to = memory_bytes
        for name, memory_bytes in made.grants:
            assert name not in self.residents
            self.waits.append(self.now - self.asked.pop(name))
            self.residents[name] = Resident(memory_bytes)
        assert sum(home.memory_bytes for home in self.residents.values()) <= self.budget
        assert not self.max_loaded or len(self.residents) <= self.max_loaded


NAMES = "abcdef"
STORIES = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "ask", "end", "progress", "turn", "turn", "wait"]), st.sampled_from(NAMES)
    ),
    max_size=120,
)


@settings(max_examples=300)
@given(
    STORIES,
    st.lists(st.integers(1, 70), min_size=6, max_size=6),
    st.sets(st.sampled_from(NAMES), max_size=2),
    st.integers(0, 3),
    st.sampled_from([0.0, 5.0]),
)
def test_in_every_story_the_promises_hold_and_everybody_is_served(
    story: list[tuple[str, str]], sizes: list[int], pinned: set[str], max_loaded: int, residency_s: float
) -> None:
    world = World(100, dict(zip(NAMES, sizes, strict=True)), pinned, max_loaded, residency_s)
    for action, name in story:
        match action:
            case "ask":
                world.ask(name)
            case "end":
                world.end(name)
            case "progress":
                world.progress()
            case "wait":
                world.now += 2.0
            case _:
                world.turn()
    # What runs ends at last, and nobody asks any more: all who wait are served.
    for _ in range(60):
        world.now += 2.0
        world.turn()
        world.progress()
        for name in NAMES:
            while name in world.residents and world.residents[name].busy:
                world.end(name)
    assert not world.asked


@pytest.mark.parametrize("residency_s", [0.0, 3.0])
def test_a_third_model_is_served_under_continuous_traffic_on_two(residency_s: float) -> None:
    world = World(100, dict.fromkeys("abc", 50), set(), 0, residency_s)
    served = dict.fromkeys("abc", 0)
    swaps = 0
    for second in range(300):
        world.now = float(second)
        for name in "abc":
            # Two requests of a second each overlap always: a model with an open gate is never idle.
            world.ask(name)
            home = world.residents.get(name)
            if home is not None and home.busy > (1 if home.gated_at is None else 0):
                world.end(name)
                served[name] += 1
        swaps += len(world.turn().grants)
        world.progress()
    assert min(served.values()) > 40, served
    assert max(world.waits) <= 3 * (residency_s + 5)
    assert swaps <= 300 / max(1.0, residency_s) * 2
