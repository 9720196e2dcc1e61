"""Memory policy: plans grants and evictions from a snapshot, without carrying them out.

The promises, which hold for every plan:

- What is granted is never more than the budget; what a process held counts until it was measured to be back.
- Nothing busy, pinned or within its minimum residency is evicted. A busy model's gate may be closed once its residency
  has passed: what runs finishes, what comes waits, and when nothing runs it is idle.
- The claim that has waited longest is served first. Others pass it only with memory that it could not use.
- What was lent beyond a model's floor is taken back before any model is evicted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

# Part of the unneeded memory that is lent to the newest model: the rest is for the next ones.
LENT_PART: Final = 0.5
# How long a model behind a closed gate may go on before another one is asked to make room in its place.
PATIENCE_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class LoadClaim:
    """A model that is asked for and has no process. `least`, `floor` and `most` as in `need.Need`."""

    name: str
    least: int
    floor: int
    most: int


@dataclass(frozen=True, slots=True)
class ModelSnapshot:
    """A model that has memory. `share` is what it has, `floor` what it cannot be without; times are monotonic."""

    name: str
    share: int
    floor: int
    is_ready: bool
    is_busy: bool
    is_pinned: bool
    # When its gate was closed; None while it is open.
    gated_at: float | None
    # Told to give back what it has beyond this, and has not yet.
    shrinking_to: int | None
    ready_at: float
    used_at: float

    @property
    def loan(self) -> int:
        return self.share - self.floor


@dataclass(frozen=True, slots=True)
class EvictionTerms:
    """The limits that the operator has set, and the bytes that processes that have ended still hold."""

    budget: int
    max_loaded: int = 0
    min_residency_s: float = 0.0
    returning: int = 0
    # How many of these processes have not ended yet.
    leaving: int = 0
    # What the machine has left now, as measured: no more than that is lent.
    available: int | None = None


@dataclass(frozen=True, slots=True)
class Infeasible:
    """A claim that cannot be served whatever is unloaded, and the reason."""

    name: str
    need: int
    cap: int
    # Held by pinned models, or the pinned models that fill `max_loaded`.
    pinned: tuple[str, ...] = ()
    is_full: bool = False


@dataclass(slots=True)
class MemoryPlan:
    """Actions to take now. `wake_at` is when the same snapshot would give another plan."""

    grants: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    never: list[Infeasible] = field(default_factory=list[Infeasible])
    evictions: list[str] = field(default_factory=list[str])
    # The gates that are to be closed; every other one is to be open.
    gated: set[str] = field(default_factory=set[str])
    shrinks: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    wake_at: float | None = None

    def wake(self, at: float | None) -> None:
        if at is not None:
            self.wake_at = at if self.wake_at is None else min(self.wake_at, at)


def plan(claims: Sequence[LoadClaim], tenants: Sequence[ModelSnapshot], terms: EvictionTerms, now: float) -> MemoryPlan:
    """`claims` in the order in which they are to be served."""
    plan = MemoryPlan()
    free = terms.budget - sum(tenant.share for tenant in tenants) - terms.returning
    places = terms.max_loaded - len(tenants) - terms.leaving if terms.max_loaded else len(claims)
    waiting = [claim for claim in claims if not _is_hopeless(claim, tenants, terms, plan)]
    is_first = True
    for position, claim in enumerate(waiting):
        floor = _floor(claim, tenants, terms)
        if floor <= free and places > 0:
            behind = sum(_floor(other, tenants, terms) for other in waiting[position + 1 :])
            spare = free - floor - behind
            if terms.available is not None:
                spare = min(spare, terms.available - floor)
            loan = int(max(0, spare) * LENT_PART) if is_first else 0
            share = min(max(claim.most, floor), floor + loan)
            plan.grants.append((claim.name, share))
            free -= share
            places -= 1
        elif is_first:
            # The others may take what this one could not use.
            promised = _make_room(floor - free, 1 - places, tenants, terms, now, plan)
            free -= max(0, floor - promised)
            places -= 1
            is_first = False
    return plan


def relieve(tenants: Sequence[ModelSnapshot], terms: EvictionTerms, now: float) -> MemoryPlan:
    """Evictions and reclaims due because the operator lowered a limit, without a waiting claim."""
    plan = MemoryPlan()
    missing = sum(tenant.share for tenant in tenants) + terms.returning - terms.budget
    places = len(tenants) + terms.leaving - terms.max_loaded if terms.max_loaded else 0
    if missing > 0 or places > 0:
        _make_room(missing, places, tenants, terms, now, plan)
    return plan


# -- who can never be served -----------------------------------------------------------------------------------------


def _floor(claim: LoadClaim, tenants: Sequence[ModelSnapshot], terms: EvictionTerms) -> int:
    """A model gets less than its floor where it could never have that much."""
    return min(claim.floor, max(claim.least, _cap(tenants, terms)))


def _cap(tenants: Sequence[ModelSnapshot], terms: EvictionTerms) -> int:
    """Memory available once every evictable model is unloaded."""
    return terms.budget - sum(tenant.floor for tenant in tenants if tenant.is_pinned)


def _is_hopeless(claim: LoadClaim, tenants: Sequence[ModelSnapshot], terms: EvictionTerms, made: MemoryPlan) -> bool:
    pinned = tuple(tenant.name for tenant in tenants if tenant.is_pinned)
    is_full = bool(terms.max_loaded) and len(pinned) >= terms.max_loaded
    cap = _cap(tenants, terms)
    if claim.least > cap or is_full:
        made.never.append(Infeasible(claim.name, claim.least, cap, pinned, is_full and claim.least <= cap))
        return True
    return False


# -- who makes room --------------------------------------------------------------------------------------------------


def _make_room(
    missing: int, places: int, tenants: Sequence[ModelSnapshot], terms: EvictionTerms, now: float, made: MemoryPlan
) -> int:
    """Have `missing` bytes and `places` places made free. Returns the bytes that are on their way."""
    places -= terms.leaving
    promised = terms.returning + sum(t.share - t.shrinking_to for t in tenants if t.shrinking_to is not None)
    lenders = {t.name: t.loan for t in tenants if t.is_ready and t.shrinking_to is None and t.loan > 0}
    victims: list[ModelSnapshot] = []
    short = missing - promised - sum(lenders.values())
    if short > 0 or places > 0:
        kept = {t.name: t.share - lenders.get(t.name, 0) if t.shrinking_to is None else t.shrinking_to for t in tenants}
        victims = _victims(short, places, tenants, kept, terms, now, made)
        if not victims:
            return promised
    for tenant in victims:
        promised += tenant.share if tenant.shrinking_to is None else tenant.shrinking_to
        lenders.pop(tenant.name, None)
        if tenant.is_busy:
            made.gated.add(tenant.name)
        else:
            made.evictions.append(tenant.name)
    # What was not used for longest is called back first, and only what is missing.
    for tenant in sorted(tenants, key=lambda tenant: tenant.used_at):
        if (part := min(lenders.get(tenant.name, 0), missing - promised)) > 0:
            made.shrinks.append((tenant.name, tenant.share - part))
            promised += part
    return promised


def _victims(
    missing: int,
    places: int,
    tenants: Sequence[ModelSnapshot],
    kept: dict[str, int],
    terms: EvictionTerms,
    now: float,
    made: MemoryPlan,
) -> list[ModelSnapshot]:
    """Models to evict: idle ones first, in order of last use, then busy ones in order of arrival. Enough, or none.

    One whose gate was closed for long and that still runs something is the last choice: others may be quicker.
    """
    turn: list[ModelSnapshot] = []
    for tenant in tenants:
        if tenant.is_pinned or not tenant.is_ready:
            continue
        if (ends := tenant.ready_at + terms.min_residency_s) > now:
            made.wake(ends)
        else:
            turn.append(tenant)

    def order(tenant: ModelSnapshot) -> tuple[bool, bool, float]:
        is_slow = False
        if tenant.is_busy and tenant.gated_at is not None:
            is_slow = now >= tenant.gated_at + PATIENCE_S
            made.wake(None if is_slow else tenant.gated_at + PATIENCE_S)
        return tenant.is_busy, is_slow, tenant.ready_at if tenant.is_busy else tenant.used_at

    chosen: list[ModelSnapshot] = []
    for tenant in sorted(turn, key=order):
        if _is_enough(chosen, kept, missing, places):
            break
        chosen.append(tenant)
    if not _is_enough(chosen, kept, missing, places):
        return []
    # One that was chosen early may have become needless.
    for tenant in list(chosen):
        rest = [each for each in chosen if each is not tenant]
        if _is_enough(rest, kept, missing, places):
            chosen = rest
    return chosen


def _is_enough(chosen: Sequence[ModelSnapshot], kept: dict[str, int], missing: int, places: int) -> bool:
    return missing <= sum(kept[tenant.name] for tenant in chosen) and places <= len(chosen)
