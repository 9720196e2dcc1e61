"""Memory broker: grants memory to models, and evicts other models to make room.

`policy.plan` decides; the broker applies its plan, and requests a new plan after every change. The broker runs on the
event loop.

Escalating memory-pressure levels for a worker above its grant, with hysteresis.

Records of the memory broker: pending grants, allocations, and memory of ended processes that is not free yet.
"""

import asyncio
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from gateway.config.settings import Config, ModelConfig
from gateway.link.link import WorkerLink
from gateway.model_files.known_times import KnownTimes
from gateway.workers.memory import policy
from gateway.workers.memory.estimate import Need, estimate, portion
from gateway.workers.memory.host import HostMemory
from gateway.workers.memory.policy import EvictionTerms, Infeasible, LoadClaim, MemoryPlan, ModelSnapshot
from gateway.workers.supervisor.state import (
    MemoryEvents,
    MemoryView,
    ModelMemory,
    ModelUnavailable,
    State,
    WorkerLimits,
)
from gateway.workers.supervisor.worker import WorkerHandle
from protocol.failures import Code, Failure
from protocol.spec import LOCAL, WorkerSpec
from protocol.to_worker import SetMemory

log = logging.getLogger(__name__)

# A footprint may exceed its grant by this fraction, because freed pages are returned to the system with a delay.
TOLERANCE: Final = 0.02
# A worker that stays above its grant by this fraction, despite the measures, is restarted.
CREEP_PART: Final = 0.1


@dataclass(frozen=True, slots=True)
class PressureMeasure:
    """Fractions of its KV and prefix cache that a worker may use, and whether it refuses new requests."""

    kv_part: float = 1.0
    cache_part: float = 1.0
    is_refusing: bool = False


# Each measure is stronger than the previous one: caches shrink, then rows are preempted, then requests are refused.
MEASURES: Final = (
    PressureMeasure(),
    PressureMeasure(1.0, 0.25),
    PressureMeasure(0.5, 0.1),
    PressureMeasure(0.25, 0.1, is_refusing=True),
)


@dataclass(slots=True)
class Pressure:
    """Pressure level of one worker. Owned by the broker; times are monotonic seconds."""

    limits: WorkerLimits
    level: int = 0
    _changed_at: float = float("-inf")
    _relaxed_since: float | None = None
    _creeping_since: float | None = None

    @property
    def measure(self) -> PressureMeasure:
        return MEASURES[self.level]

    def observe(self, now: float, footprint: int, memory_bytes: int, *, is_short: bool) -> bool:
        """Update the level, and return whether it changed. `is_short` means that the machine is short of memory."""
        is_creeping = footprint > memory_bytes + max(self.limits.creep_bytes, int(memory_bytes * CREEP_PART))
        if not is_creeping:
            self._creeping_since = None
        elif self._creeping_since is None:
            self._creeping_since = now
        before = self.level
        if is_short or footprint > memory_bytes * (1 + TOLERANCE):
            self._relaxed_since = None
            # Only a machine that is short of memory makes a worker refuse new requests: a worker slightly above its
            # grant may stay there.
            most = len(MEASURES) - 1 if is_short else len(MEASURES) - 2
            if self.level < most and now - self._changed_at >= self.limits.squeeze_s:
                self.level += 1
            elif self.level > most:
                self.level = most
        elif self.level:
            self._relaxed_since = now if self._relaxed_since is None else self._relaxed_since
            if now - self._relaxed_since >= self.limits.relax_s:
                self.level -= 1
                self._relaxed_since = now
        if self.level != before:
            self._changed_at = now
        return self.level != before

    def is_hopeless(self, now: float) -> bool:
        """Whether only a restart of the process can lower its memory."""
        return self._creeping_since is not None and self.level > 0 and now - self._creeping_since >= self.limits.creep_s


@dataclass(slots=True)
class PendingGrant:
    """Memory grant that a worker waits for. Owned by the broker."""

    name: str
    # Serial number that orders grants by arrival. It is taken before the model's files are read, because reading may
    # take longer for an earlier request.
    number: int
    since: float
    need: Need
    answer: asyncio.Future[int]
    # Whether other models are evicted for this grant.
    is_swap: bool = False

    @property
    def claim(self) -> LoadClaim:
        return LoadClaim(self.name, self.need.least, self.need.floor, self.need.most)


@dataclass(slots=True)
class Allocation:
    """Memory of a worker, from the grant to the end of its process. Owned by the broker."""

    name: str
    memory_bytes: int
    floor: int
    most: int
    used_at: float
    pressure: Pressure
    # Time at which the model was requested; None once the model is ready, and for an adopted worker.
    requested_at: float | None = None
    is_swap: bool = False
    gated_at: float | None = None
    # Bytes to which the worker was ordered to shrink.
    shrinking_to: int | None = None
    # Deadline of the order to shrink.
    shrink_ends: float = 0.0
    # Reason of the worker's eviction; empty if there is none.
    evict_reason: str = ""
    pid: int = 0
    footprint: int = 0
    # Free memory of the machine when the worker was evicted.
    available: int = 0

    @property
    def held(self) -> int:
        """Bytes that count against the budget: the grant or the measured footprint, whichever is larger."""
        return max(self.memory_bytes, self.footprint)


@dataclass(frozen=True, slots=True)
class MemoryReturn:
    """Memory of a process that has ended; it counts against the budget until it is measured as free."""

    name: str
    pid: int
    memory_bytes: int
    footprint: int
    available: int
    since: float


_WITHOUT_PROCESS: Final = frozenset({State.STOPPED, State.BACKOFF, State.FAILED, State.INCOMPATIBLE})
# A load waits until the system reports this fraction of an ended process's memory as free, or until RETURN_DEADLINE_S
# has passed.
RETURNED_PART: Final = 0.95
RETURN_DEADLINE_S: Final = 2.0
RETURN_POLL_S: Final = 0.02
SHRINK_DEADLINE_S: Final = 5.0
ROOM_POLL_S: Final = 0.05
FAULT_PAUSE_S: Final = 1.0


class Broker:
    """Owner of all memory grants. `workers` maps model names to the pool's workers."""

    def __init__(
        self,
        config: Config,
        workers: Mapping[str, WorkerHandle],
        link: WorkerLink,
        events: MemoryEvents,
        machine: HostMemory,
        limits: WorkerLimits,
        times: KnownTimes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self.workers = workers
        self._link = link
        self._events = events
        self.machine = machine
        self._limits = limits
        self._times = times
        self.allocations: dict[str, Allocation] = {}
        self._leases = Counter[str]()
        self._pending: dict[str, PendingGrant] = {}
        self._returns: list[MemoryReturn] = []
        self._numbers = itertools.count()
        self._changed = asyncio.Event()
        self._pins: dict[str, bool] = {}
        self._models: Mapping[str, ModelConfig] = {}
        self.configure(config)

    def configure(self, config: Config) -> None:
        """Apply a configuration. A changed `pin` setting of a model overrides an operator's earlier `pin` command."""
        before, self._models = self._models, config.models
        self._pins = {
            name: is_pinned
            for name, is_pinned in self._pins.items()
            if name in config.models and (name not in before or before[name].pin == config.models[name].pin)
        }
        self._memory = config.memory
        budget = config.memory.budget_bytes
        self.budget = self.machine.budget() if budget == "auto" else budget
        self._changed.set()

    # -- workers and requests ----------------------------------------------------------------------------------------

    async def admit(self, spec: WorkerSpec) -> int:
        """Wait for memory, and return the granted bytes. Raises `ModelUnavailable` if the model can never fit."""
        name = spec.name
        number, since = next(self._numbers), self.clock()
        model = self._models.get(name)
        if model is None:  # the model was removed from the configuration meanwhile
            return 0
        need = await asyncio.to_thread(self._need_here, model)
        pending = PendingGrant(name, number, since, need, asyncio.get_running_loop().create_future())
        self._pending[name] = pending
        self._changed.set()
        try:
            return await pending.answer
        finally:
            if self._pending.get(name) is pending:
                del self._pending[name]
            self._changed.set()

    async def fits(self, name: str) -> bool:
        """Whether a model could be loaded now without unloading another one, or can never be loaded."""
        model = self._models.get(name)
        if model is None:
            return True
        need = await asyncio.to_thread(self._need_here, model)
        if self._pending:
            return False
        claim = policy.LoadClaim(name, need.least, need.floor, need.most)
        made = policy.plan([claim], self._snapshot(), self._eviction_terms(), self.clock())
        return bool(made.grants or made.shrinks or made.infeasible) and not (made.evictions or made.gated)

    def on_state(self, name: str, state: State) -> None:
        """Update a worker's grant after a change of its state."""
        now = self.clock()
        allocation = self.allocations.get(name)
        if allocation is not None and state in _WITHOUT_PROCESS:
            del self.allocations[name]
            if allocation.pid:
                before = allocation.available or self.machine.available()
                self._returns.append(
                    MemoryReturn(name, allocation.pid, allocation.held, allocation.footprint, before, now)
                )
        elif allocation is not None and state is State.READY:
            if allocation.is_swap and allocation.requested_at is not None:
                self._events.model_swapped_in(name, now - allocation.requested_at)
            allocation.requested_at, allocation.used_at = None, now
        self._changed.set()

    def adopt(self, name: str, memory_bytes: int) -> None:
        """Record the memory of an adopted worker, which an earlier gateway started."""
        need = self._need_here(self._models[name])
        memory_bytes = memory_bytes or need.floor
        self.allocations[name] = self._new_allocation(name, memory_bytes, need)

    def _need_here(self, model: ModelConfig) -> Need:
        """Estimate the memory of a model's processes on this machine, which are all local ranks of a group. Reads
        files.
        """
        profile, group = self._times.of(model.name, model.path), model.group
        need = estimate(model, self.budget, profile.load if profile is not None else None)
        if not group.ranks:
            return need
        local = group.ranks.count(LOCAL)
        return portion(need, local / len(group.ranks), local)

    @contextmanager
    def lease(self, name: str) -> Generator[None, None, None]:
        """Keep a model busy for one request, from before `Pool.ensure_ready` to its end."""
        self._leases[name] += 1
        self._note_use(name)
        try:
            yield
        finally:
            self._leases[name] -= 1
            if not self._leases[name]:
                del self._leases[name]
            self._note_use(name)

    def leases(self, name: str) -> int:
        """Return how many requests lease a model."""
        return self._leases[name]

    def _note_use(self, name: str) -> None:
        if (allocation := self.allocations.get(name)) is not None:
            allocation.used_at = self.clock()
        if self._pending:
            self._changed.set()

    # -- operators ---------------------------------------------------------------------------------------------------

    def pin(self, name: str, is_pinned: bool) -> None:
        """Pin or unpin a model until the daemon ends or its configured `pin` changes."""
        self._pins[name] = is_pinned
        self._changed.set()

    def is_pinned(self, name: str) -> bool:
        model = self._models.get(name)
        return self._pins.get(name, model is not None and model.pin)

    def ttl_s(self, name: str) -> float:
        """Return how many seconds a model stays loaded without a request; 0 means forever."""
        model = self._models.get(name)
        return 0.0 if model is None or self.is_pinned(name) else model.ttl_s

    def view(self) -> MemoryView:
        now = self.clock()
        models = {
            name: ModelMemory(
                share_bytes=allocation.memory_bytes,
                floor_bytes=allocation.floor,
                footprint_bytes=allocation.footprint,
                idle_s=now - allocation.used_at,
                is_gated=allocation.gated_at is not None,
            )
            for name, allocation in self.allocations.items()
        }
        waiting = tuple(pending.name for pending in self._queue())
        footprint = sum(allocation.footprint for allocation in self.allocations.values())
        return MemoryView(self.budget, self.granted, footprint, waiting, models)

    @property
    def granted(self) -> int:
        """Sum of the bytes granted to workers and the bytes of ended processes that are not free yet."""
        workers = sum(allocation.held for allocation in self.allocations.values())
        return workers + sum(each.memory_bytes for each in self._returns)

    @property
    def has_waiters(self) -> bool:
        return bool(self._pending) or bool(self._returns)

    # -- plans -------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Apply a new plan after every change, until cancelled."""
        wake_at: float | None = None
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._delay_s(wake_at)):
                    await self._changed.wait()
            self._changed.clear()
            try:
                wake_at = self._plan_memory()
            except Exception:  # The loop must go on after any error.
                log.exception("internal error while memory was granted")
                wake_at = self.clock() + FAULT_PAUSE_S

    def _delay_s(self, wake_at: float | None) -> float | None:
        if self._returns:
            return RETURN_POLL_S
        # A worker reports freed memory to the link, which does not set `_changed`, so the broker polls.
        if any(
            allocation.shrinking_to is not None or allocation.gated_at is not None
            for allocation in self.allocations.values()
        ):
            return ROOM_POLL_S
        return None if wake_at is None else max(0.0, wake_at - self.clock())

    def _plan_memory(self) -> float | None:
        """Apply one plan. Return the time at which the next plan is due even without a change."""
        now = self.clock()
        self._check_returns(now)
        for allocation in self.allocations.values():
            self._end_shrinking(allocation, now)
        if queue := self._queue():
            plan = policy.plan([pending.claim for pending in queue], self._snapshot(), self._eviction_terms(), now)
        else:
            plan = policy.relieve(self._snapshot(), self._eviction_terms(), now)
        self._apply(plan, now)
        return plan.wake_at

    def _queue(self) -> list[PendingGrant]:
        waiting = (pending for pending in self._pending.values() if not pending.answer.done())
        return sorted(waiting, key=lambda pending: pending.number)

    def _eviction_terms(self) -> EvictionTerms:
        exiting = [allocation for allocation in self.allocations.values() if self._is_exiting(allocation)]
        returning = sum(allocation.held for allocation in exiting) + sum(each.memory_bytes for each in self._returns)
        memory, residency_s, available = self._memory, self._limits.residency_s, self.machine.available()
        return EvictionTerms(self.budget, memory.max_loaded, residency_s, returning, len(exiting), available)

    def _snapshot(self) -> list[ModelSnapshot]:
        return [
            self._model_snapshot(allocation)
            for allocation in self.allocations.values()
            if not self._is_exiting(allocation)
        ]

    def _is_exiting(self, allocation: Allocation) -> bool:
        state = self.workers[allocation.name].state
        return bool(allocation.evict_reason) or state in (State.DRAINING, State.STOPPING)

    def _model_snapshot(self, allocation: Allocation) -> ModelSnapshot:
        worker = self.workers[allocation.name]
        return ModelSnapshot(
            allocation.name,
            allocation.held,
            min(allocation.floor, allocation.held),
            is_ready=worker.state is State.READY,
            is_busy=self.is_busy(worker),
            is_pinned=self.is_pinned(allocation.name),
            gated_at=allocation.gated_at,
            shrinking_to=allocation.shrinking_to,
            ready_at=worker.process.ready_at,
            used_at=allocation.used_at,
        )

    def is_busy(self, worker: WorkerHandle) -> bool:
        """Whether a model runs or expects requests. Leases of a gated model do not count: their requests only wait."""
        is_leased = self.leases(worker.name) > 0 and self.allocations[worker.name].gated_at is None
        return is_leased or worker.has_parked or self._link.is_busy(worker.epoch)

    def _apply(self, plan: MemoryPlan, now: float) -> None:
        for claim in plan.infeasible:
            self._refuse(claim)
        for name in plan.evictions:
            self.evict(name, "memory")
        for name, allocation in self.allocations.items():
            if name in plan.gated and allocation.gated_at is None:
                log.info("model %s takes no new requests until it is unloaded", name)
                allocation.gated_at = now
                self.workers[name].close_gate()
            elif name not in plan.gated and allocation.gated_at is not None and not allocation.evict_reason:
                allocation.gated_at = None
                self.workers[name].open_gate()
        for name, memory_bytes in plan.shrinks:
            self._shrink(self.allocations[name], memory_bytes, now)
        for name, memory_bytes in plan.grants:
            self._grant(self._pending[name], memory_bytes, now)
        if (plan.evictions or plan.gated or plan.shrinks) and (queue := self._queue()):
            queue[0].is_swap |= bool(plan.evictions or plan.gated)

    def evict(self, name: str, reason: str) -> bool:
        """Stop an idle worker. Return False if the worker is busy now."""
        allocation, worker = self.allocations[name], self.workers[name]
        if self.is_busy(worker) or not worker.evict():
            return False
        log.info("unloading model %s: %s", name, reason)
        allocation.evict_reason = reason
        allocation.pid, allocation.available = worker.pid, self.machine.available()
        # The process's exit is expected to free this footprint.
        allocation.footprint = sum(map(self.machine.footprint, worker.process.pids)) or allocation.footprint
        self._events.model_evicted(name, reason)
        return True

    def _grant(self, pending: PendingGrant, memory_bytes: int, now: float) -> None:
        allocation = self._new_allocation(pending.name, memory_bytes, pending.need)
        allocation.requested_at, allocation.is_swap = pending.since, pending.is_swap
        self.allocations[pending.name] = allocation
        pending.answer.set_result(memory_bytes)
        reason = "swap" if pending.is_swap else "room"
        self._events.memory_granted(pending.name, now - pending.since, reason)
        log.info("model %s is granted %d MiB (%s)", pending.name, memory_bytes >> 20, reason)

    def _new_allocation(self, name: str, memory_bytes: int, need: Need) -> Allocation:
        return Allocation(
            name, memory_bytes, min(memory_bytes, need.floor), need.most, self.clock(), Pressure(self._limits)
        )

    def _refuse(self, infeasible: Infeasible) -> None:
        pending = self._pending[infeasible.name]
        why = _why(infeasible, self.budget, self._memory.max_loaded)
        log.error("model '%s' cannot be loaded: %s", infeasible.name, why)
        message = f"model '{infeasible.name}' {why}"
        pending.answer.set_exception(ModelUnavailable(Failure(Code.DOES_NOT_FIT, message)))

    # -- changes of grants -------------------------------------------------------------------------------------------

    def send_grant(self, allocation: Allocation, memory_bytes: int) -> bool:
        """Send a worker its grant and its pressure measure. Return False if the worker cannot be reached."""
        worker, measure = self.workers[allocation.name], allocation.pressure.measure
        return worker.process.send(SetMemory(memory_bytes, measure.kv_part, measure.cache_part))

    def _shrink(self, allocation: Allocation, memory_bytes: int, now: float) -> None:
        if self.send_grant(allocation, memory_bytes):
            log.info("model %s gives back %d MiB", allocation.name, (allocation.memory_bytes - memory_bytes) >> 20)
            allocation.shrinking_to, allocation.shrink_ends = memory_bytes, now + SHRINK_DEADLINE_S

    def _end_shrinking(self, allocation: Allocation, now: float) -> None:
        """Lower a grant once the worker has shrunk to the ordered size. At the deadline, lower it to the size that the
        worker has reached.
        """
        target = allocation.shrinking_to
        if target is None:
            return
        worker = self.workers[allocation.name]
        worker.process.ping()
        stats = worker.stats
        if stats is not None and stats.granted_bytes == target:
            allocation.footprint = sum(map(self.machine.footprint, worker.process.pids))
            if allocation.footprint <= target:
                allocation.memory_bytes, allocation.shrinking_to = target, None
                return
        if now >= allocation.shrink_ends:
            held = (
                max(target, allocation.footprint)
                if stats is not None and stats.granted_bytes == target
                else allocation.held
            )
            log.warning("model %s holds %d MiB, above its target of %d", allocation.name, held >> 20, target >> 20)
            allocation.memory_bytes = allocation.floor = held
            allocation.shrinking_to = None

    # -- memory of ended processes -----------------------------------------------------------------------------------

    def _check_returns(self, now: float) -> None:
        """Stop counting memory of ended processes once it is free again or its deadline has passed."""
        for each in list(self._returns):
            left = self.machine.unreturned(each.pid, each.footprint, each.available)
            part = 1.0 if each.footprint == 0 else 1 - left / each.footprint
            if part < RETURNED_PART and now - each.since < RETURN_DEADLINE_S:
                continue
            self._returns.remove(each)
            self._events.memory_returned(each.name, max(0.0, part))
            if part < RETURNED_PART:
                log.error("model %s: %.0f %% of its memory came back", each.name, 100 * part)


def _why(infeasible: Infeasible, budget: int, max_loaded: int) -> str:
    """Explain why a claim cannot be served, with the sizes involved."""
    pinned = ", ".join(infeasible.pinned)
    if infeasible.is_full:
        return f"cannot be loaded: max_loaded is {max_loaded}, and as many are pinned ({pinned})."
    need = f"does not fit: it needs {_size(infeasible.need)}, and the memory budget is {_size(budget)}"
    return f"{need}, {_size(budget - infeasible.cap)} of it for pinned models ({pinned})." if pinned else need + "."


def _size(count: int) -> str:
    return f"{count / 1024**3:.1f} GiB" if count >= 1 << 30 else f"{count / 1024**2:.0f} MiB"
