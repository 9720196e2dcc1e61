"""Memory policy: plans grants and evictions from a snapshot.

Invariants of every plan:

- Grants never exceed the budget. The memory of an ended process counts until its return is measured.
- A model is not evicted while it is busy or pinned, or within its minimum residency. After that time the gate of a
  busy model may be closed: running requests finish, new requests wait, and the model becomes idle.
- The oldest claim is served first. Until then, a later claim gets only memory that the oldest claim could not use.
- Loans beyond a model's floor are taken back before any model is evicted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

# A new model is lent this fraction of the spare memory.
LENT_PART: Final = 0.5
# A model that is still busy this long after its gate was closed becomes the last choice for eviction.
PATIENCE_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class LoadClaim:
    """Claim of a model that waits for memory. `least`, `floor` and `most` are copied from the model's `Need`."""

    name: str
    least: int
    floor: int
    most: int


@dataclass(frozen=True, slots=True)
class ModelSnapshot:
    """Model that has memory: `floor` of its `memory_bytes` are its own, and the rest is a loan. Times are
    monotonic seconds.
    """

    name: str
    memory_bytes: int
    floor: int
    is_ready: bool
    is_busy: bool
    is_pinned: bool
    # Time at which the model's gate was closed; None while the gate is open.
    gated_at: float | None
    # The bytes to which the worker was ordered to shrink, until the worker has reached it.
    shrinking_to: int | None
    ready_at: float
    used_at: float

    @property
    def loan(self) -> int:
        return self.memory_bytes - self.floor


@dataclass(frozen=True, slots=True)
class EvictionTerms:
    """Configured limits, and memory that is not available yet."""

    budget: int
    max_loaded: int = 0
    min_residency_s: float = 0.0
    # Bytes of exiting and ended processes that are not free yet.
    returning: int = 0
    # Number of processes that have not exited yet.
    exiting: int = 0
    # Measured free memory of the machine, which limits loans.
    available: int | None = None


@dataclass(frozen=True, slots=True)
class Infeasible:
    """Claim that cannot be served even if all evictable models are unloaded, and the reason."""

    name: str
    need: int
    cap: int
    pinned: tuple[str, ...] = ()
    # Whether pinned models fill `max_loaded`.
    is_full: bool = False


@dataclass(slots=True)
class MemoryPlan:
    """Actions to take now. From `wake_at` on, the same snapshot would give a different plan."""

    grants: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    infeasible: list[Infeasible] = field(default_factory=list[Infeasible])
    evictions: list[str] = field(default_factory=list[str])
    # Models whose gates must be closed; all other gates must be open.
    gated: set[str] = field(default_factory=set[str])
    shrinks: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    wake_at: float | None = None

    def wake(self, at: float | None) -> None:
        if at is not None:
            self.wake_at = at if self.wake_at is None else min(self.wake_at, at)


def plan(claims: Sequence[LoadClaim], models: Sequence[ModelSnapshot], terms: EvictionTerms, now: float) -> MemoryPlan:
    """Make a plan for `claims`, which are in order of arrival."""
    plan = MemoryPlan()
    free = terms.budget - sum(model.memory_bytes for model in models) - terms.returning
    places = terms.max_loaded - len(models) - terms.exiting if terms.max_loaded else len(claims)
    waiting = [claim for claim in claims if not _is_hopeless(claim, models, terms, plan)]
    is_first = True
    for position, claim in enumerate(waiting):
        floor = _floor(claim, models, terms)
        if floor <= free and places > 0:
            behind = sum(_floor(other, models, terms) for other in waiting[position + 1 :])
            spare = free - floor - behind
            if terms.available is not None:
                spare = min(spare, terms.available - floor)
            loan = int(max(0, spare) * LENT_PART) if is_first else 0
            memory_bytes = min(max(claim.most, floor), floor + loan)
            plan.grants.append((claim.name, memory_bytes))
            free -= memory_bytes
            places -= 1
        elif is_first:
            # Later claims may use only memory that this claim cannot use.
            promised = _make_room(floor - free, 1 - places, models, terms, now, plan)
            free -= max(0, floor - promised)
            places -= 1
            is_first = False
    return plan


def relieve(models: Sequence[ModelSnapshot], terms: EvictionTerms, now: float) -> MemoryPlan:
    """Plan the evictions and shrinks that follow from a lowered limit, while no claim waits."""
    plan = MemoryPlan()
    missing = sum(model.memory_bytes for model in models) + terms.returning - terms.budget
    places = len(models) + terms.exiting - terms.max_loaded if terms.max_loaded else 0
    if missing > 0 or places > 0:
        _make_room(missing, places, models, terms, now, plan)
    return plan


# -- claims that cannot be served ------------------------------------------------------------------------------------


def _floor(claim: LoadClaim, models: Sequence[ModelSnapshot], terms: EvictionTerms) -> int:
    """Return the floor of a claim, but at most the memory that its model can ever get."""
    return min(claim.floor, max(claim.least, _cap(models, terms)))


def _cap(models: Sequence[ModelSnapshot], terms: EvictionTerms) -> int:
    """Return the memory that is available after all evictable models are unloaded."""
    return terms.budget - sum(model.floor for model in models if model.is_pinned)


def _is_hopeless(claim: LoadClaim, models: Sequence[ModelSnapshot], terms: EvictionTerms, plan: MemoryPlan) -> bool:
    pinned = tuple(model.name for model in models if model.is_pinned)
    is_full = bool(terms.max_loaded) and len(pinned) >= terms.max_loaded
    cap = _cap(models, terms)
    if claim.least > cap or is_full:
        plan.infeasible.append(Infeasible(claim.name, claim.least, cap, pinned, is_full and claim.least <= cap))
        return True
    return False


# -- models that make room -------------------------------------------------------------------------------------------


def _make_room(
    missing: int, places: int, models: Sequence[ModelSnapshot], terms: EvictionTerms, now: float, plan: MemoryPlan
) -> int:
    """Plan to free `missing` bytes and `places` of the `max_loaded` places. Return the bytes that will be freed."""
    places -= terms.exiting
    promised = terms.returning + sum(t.memory_bytes - t.shrinking_to for t in models if t.shrinking_to is not None)
    lenders = {t.name: t.loan for t in models if t.is_ready and t.shrinking_to is None and t.loan > 0}
    victims: list[ModelSnapshot] = []
    short = missing - promised - sum(lenders.values())
    if short > 0 or places > 0:
        kept = {
            t.name: t.memory_bytes - lenders.get(t.name, 0) if t.shrinking_to is None else t.shrinking_to
            for t in models
        }
        victims = _victims(short, places, models, kept, terms, now, plan)
        if not victims:
            return promised
    for model in victims:
        promised += model.memory_bytes if model.shrinking_to is None else model.shrinking_to
        lenders.pop(model.name, None)
        if model.is_busy:
            plan.gated.add(model.name)
        else:
            plan.evictions.append(model.name)
    # Loans are taken back from the least recently used model first, and only as far as needed.
    for model in sorted(models, key=lambda model: model.used_at):
        if (part := min(lenders.get(model.name, 0), missing - promised)) > 0:
            plan.shrinks.append((model.name, model.memory_bytes - part))
            promised += part
    return promised


def _victims(
    missing: int,
    places: int,
    models: Sequence[ModelSnapshot],
    kept: dict[str, int],
    terms: EvictionTerms,
    now: float,
    plan: MemoryPlan,
) -> list[ModelSnapshot]:
    """Return enough models to evict, or an empty list if there are not enough.

    Idle models come first, by their last use, then busy models, by the time of their load. A model that is still busy
    long after its gate was closed comes last, because other models may finish sooner.
    """
    evictable: list[ModelSnapshot] = []
    for model in models:
        if model.is_pinned or not model.is_ready:
            continue
        if (ends := model.ready_at + terms.min_residency_s) > now:
            plan.wake(ends)
        else:
            evictable.append(model)

    def order(model: ModelSnapshot) -> tuple[bool, bool, float]:
        is_slow = False
        if model.is_busy and model.gated_at is not None:
            is_slow = now >= model.gated_at + PATIENCE_S
            plan.wake(None if is_slow else model.gated_at + PATIENCE_S)
        return model.is_busy, is_slow, model.ready_at if model.is_busy else model.used_at

    chosen: list[ModelSnapshot] = []
    for model in sorted(evictable, key=order):
        if _is_enough(chosen, kept, missing, places):
            break
        chosen.append(model)
    if not _is_enough(chosen, kept, missing, places):
        return []
    # Models that were chosen later may make an earlier choice unnecessary.
    for model in list(chosen):
        rest = [each for each in chosen if each is not model]
        if _is_enough(rest, kept, missing, places):
            chosen = rest
    return chosen


def _is_enough(chosen: Sequence[ModelSnapshot], kept: dict[str, int], missing: int, places: int) -> bool:
    return missing <= sum(kept[model.name] for model in chosen) and places <= len(chosen)
