"""Shares out the machine's memory among the models: who may be loaded, and who makes room for whom.

`policy.plan` decides; this carries it out, and asks it again whenever anything has changed. All on the event loop.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

from gateway.config.settings import Config, ModelConfig
from gateway.link.link import WorkerLink
from gateway.model_files.known_times import KnownTimes
from gateway.workers.memory import policy
from gateway.workers.memory.estimate import Need, estimate, portion
from gateway.workers.memory.grants import Allocation, MemoryReturn, PendingGrant
from gateway.workers.memory.host import HostMemory
from gateway.workers.memory.policy import EvictionTerms, Infeasible, MemoryPlan, ModelSnapshot
from gateway.workers.memory.pressure import Pressure
from gateway.workers.supervisor.handle import WorkerHandle
from gateway.workers.supervisor.state import (
    MemoryEvents,
    MemoryView,
    ModelMemory,
    ModelUnavailable,
    State,
    WorkerLimits,
)
from protocol.failures import Code, Failure
from protocol.sharding import parts_of
from protocol.spec import LOCAL, WorkerSpec
from protocol.to_worker import SetMemory

log = logging.getLogger(__name__)

# A worker in one of these has no process.
_GONE: Final = frozenset({State.STOPPED, State.BACKOFF, State.FAILED, State.INCOMPATIBLE})
# Memory is back when this part of what a process held is; the next load does not wait longer than this for it.
RETURNED_PART: Final = 0.95
RETURN_DEADLINE_S: Final = 2.0
RETURN_POLL_S: Final = 0.02
SHRINK_DEADLINE_S: Final = 5.0
ROOM_POLL_S: Final = 0.05
# Whatever the operator says: those who waited for a model are served before it may leave again.
TURN_S: Final = 0.5
FAULT_PAUSE_S: Final = 1.0


class Broker:
    """Owns every grant. `workers` are the pool's, by name."""

    def __init__(
        self,
        config: Config,
        workers: Mapping[str, WorkerHandle],
        link: WorkerLink,
        events: MemoryEvents,
        machine: HostMemory,
        limits: WorkerLimits,
        clock: Callable[[], float],
        times: KnownTimes | None = None,
    ) -> None:
        self._workers = workers
        self._link = link
        self._events = events
        self.machine = machine
        self._limits = limits
        self._clock = clock
        # What loads before have shown; None knows nothing.
        self._times = times
        # Of groups with ranks on other machines; None where there can be none.
        self.tenancies: dict[str, Allocation] = {}
        self._leases: dict[str, int] = {}
        self._asking: dict[str, PendingGrant] = {}
        self._returns: list[MemoryReturn] = []
        self._numbers = itertools.count()
        self._poke = asyncio.Event()
        self._pins: dict[str, bool] = {}
        self._models: Mapping[str, ModelConfig] = {}
        self.configure(config)

    def configure(self, config: Config) -> None:
        """Another configuration. Where a model's own `pin` changed, it counts again instead of what was ordered."""
        before, self._models = self._models, config.models
        self._pins = {
            name: is_pinned
            for name, is_pinned in self._pins.items()
            if name in config.models and (name not in before or before[name].pin == config.models[name].pin)
        }
        self._memory = config.memory
        budget = config.memory.budget_bytes
        self.budget = self.machine.budget() if budget == "auto" else budget
        self._poke.set()

    # -- the workers' side -------------------------------------------------------------------------------------------

    async def admit(self, spec: WorkerSpec) -> int:
        """Wait for room; returns the share in bytes. Raises `ModelUnavailable` when there can never be any."""
        name = spec.name
        number, since = next(self._numbers), self._clock()
        model = self._models.get(name)
        if model is None:  # removed, and on its way out
            return 0
        need = await asyncio.to_thread(self._need_here, model)
        asking = PendingGrant(name, number, since, need, asyncio.get_running_loop().create_future())
        self._asking[name] = asking
        self._poke.set()
        try:
            return await asking.answer
        finally:
            if self._asking.get(name) is asking:
                del self._asking[name]
            self._poke.set()

    def on_state(self, name: str, state: State) -> None:
        """A worker has changed its state."""
        now = self._clock()
        tenancy = self.tenancies.get(name)
        if tenancy is not None and state in _GONE:
            del self.tenancies[name]
            if tenancy.pid:
                before = tenancy.available or self.machine.available()
                self._returns.append(MemoryReturn(name, tenancy.pid, tenancy.held, tenancy.footprint, before, now))
        elif tenancy is not None and state is State.READY:
            if tenancy.is_swap and tenancy.asked_at is not None:
                self._events.model_swapped_in(name, now - tenancy.asked_at)
            tenancy.asked_at, tenancy.used_at = None, now
        self._poke.set()

    def adopt(self, name: str, share: int) -> None:
        """A worker of an earlier gateway has this share already."""
        need = self._need_here(self._models[name])
        share = share or need.floor
        self.tenancies[name] = self._tenancy(name, share, need)

    def _need_here(self, model: ModelConfig) -> Need:
        """Of the ranks of a group those on this machine: its grant is for all of them."""
        need, group = self.need_of(model), model.group
        if not group.ranks:
            return need
        parts = zip(group.ranks, parts_of(len(group.ranks), group.split), strict=True)
        here = [part for node, part in parts if node == LOCAL]
        return portion(need, sum(here), len(here))

    def need_of(self, model: ModelConfig) -> Need:
        """Memory of a model in one process. Reads files."""
        wisdom = self._times.of(model.name, model.path) if self._times is not None else None
        return estimate(model, self.budget, wisdom.load if wisdom is not None else None)

    def hold(self, name: str) -> None:
        """Count a request that holds a model: it is busy until `release`."""
        self._leases[name] = self.leases(name) + 1
        self._used(name)

    def release(self, name: str) -> None:
        self._leases[name] -= 1
        if not self._leases[name]:
            del self._leases[name]
        self._used(name)

    def leases(self, name: str) -> int:
        """The number of requests that hold a model."""
        return self._leases.get(name, 0)

    def _used(self, name: str) -> None:
        if (tenancy := self.tenancies.get(name)) is not None:
            tenancy.used_at = self._clock()
        if self._asking:
            self._poke.set()

    # -- the operator's side -----------------------------------------------------------------------------------------

    def pin(self, name: str, is_pinned: bool) -> None:
        """Until the daemon ends, or the configuration says otherwise."""
        self._pins[name] = is_pinned
        self._poke.set()

    def is_pinned(self, name: str) -> bool:
        model = self._models.get(name)
        return self._pins.get(name, model is not None and model.pin)

    def ttl_s(self, name: str) -> float:
        """Seconds that a model stays loaded without a request; 0 is forever."""
        model = self._models.get(name)
        return 0.0 if model is None or self.is_pinned(name) else model.ttl_s

    def view(self) -> MemoryView:
        now = self._clock()
        models = {
            name: ModelMemory(
                share_bytes=tenancy.share,
                floor_bytes=tenancy.floor,
                footprint_bytes=tenancy.footprint,
                idle_s=now - tenancy.used_at,
                is_gated=tenancy.gated_at is not None,
            )
            for name, tenancy in self.tenancies.items()
        }
        waiting = tuple(asking.name for asking in self._queue())
        footprint = sum(tenancy.footprint for tenancy in self.tenancies.values())
        return MemoryView(self.budget, self.granted, footprint, waiting, models)

    @property
    def granted(self) -> int:
        """Bytes that are spoken for: by workers, and by what processes that have ended still hold."""
        workers = sum(tenancy.held for tenancy in self.tenancies.values())
        return workers + sum(each.share for each in self._returns)

    @property
    def has_waiters(self) -> bool:
        return bool(self._asking) or bool(self._returns)

    # -- carrying out ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Look again at every change, until cancelled."""
        wake_at: float | None = None
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._delay_s(wake_at)):
                    await self._poke.wait()
            self._poke.clear()
            try:
                wake_at = self._settle()
            except Exception:  # The root of the task: what runs must go on, and the next look may be luckier.
                log.exception("internal error while memory was granted")
                wake_at = self._clock() + FAULT_PAUSE_S

    def _delay_s(self, wake_at: float | None) -> float | None:
        if self._returns:
            return RETURN_POLL_S
        # A worker that makes room is not done at an event of ours alone: what it still says comes by the link.
        if any(t.shrinking_to is not None or t.gated_at is not None for t in self.tenancies.values()):
            return ROOM_POLL_S
        return None if wake_at is None else max(0.0, wake_at - self._clock())

    def _settle(self) -> float | None:
        """One look at everything; returns when to look again at the latest."""
        now = self._clock()
        self._collect(now)
        for tenancy in self.tenancies.values():
            self._end_shrinking(tenancy, now)
        if queue := self._queue():
            plan = policy.plan([asking.claim for asking in queue], self.picture(), self.terms(), now)
        else:
            plan = policy.relieve(self.picture(), self.terms(), now)
        self._carry_out(plan, now)
        return plan.wake_at

    def _queue(self) -> list[PendingGrant]:
        waiting = (asking for asking in self._asking.values() if not asking.answer.done())
        return sorted(waiting, key=lambda asking: asking.number)

    def terms(self) -> EvictionTerms:
        leaving = [tenancy for tenancy in self.tenancies.values() if self._is_leaving(tenancy)]
        returning = sum(t.held for t in leaving) + sum(each.share for each in self._returns)
        memory = self._memory
        residency_s = max(memory.min_residency_s, TURN_S)
        available = self.machine.available()
        return EvictionTerms(self.budget, memory.max_loaded, residency_s, returning, len(leaving), available)

    def picture(self) -> list[ModelSnapshot]:
        return [self._tenant(tenancy) for tenancy in self.tenancies.values() if not self._is_leaving(tenancy)]

    def _is_leaving(self, tenancy: Allocation) -> bool:
        state = self._workers[tenancy.name].state
        return bool(tenancy.leaving) or state in (State.DRAINING, State.STOPPING)

    def _tenant(self, tenancy: Allocation) -> ModelSnapshot:
        worker = self._workers[tenancy.name]
        return ModelSnapshot(
            tenancy.name,
            tenancy.held,
            min(tenancy.floor, tenancy.held),
            is_ready=worker.state is State.READY,
            is_busy=self.is_busy(worker),
            is_pinned=self.is_pinned(tenancy.name),
            gated_at=tenancy.gated_at,
            shrinking_to=tenancy.shrinking_to,
            ready_at=worker.incarnation.ready_at,
            used_at=tenancy.used_at,
        )

    def is_busy(self, worker: WorkerHandle) -> bool:
        """Behind a closed gate only what runs counts: who waits there holds a lease, too."""
        is_asked_for = self.leases(worker.name) > 0 and self.tenancies[worker.name].gated_at is None
        return is_asked_for or worker.has_parked or self._link.is_busy(worker.epoch)

    def _carry_out(self, made: MemoryPlan, now: float) -> None:
        for never in made.never:
            self._refuse(never)
        for name in made.evictions:
            self.evict(name, "memory")
        for name, tenancy in self.tenancies.items():
            if name in made.gated and tenancy.gated_at is None:
                log.info("model %s takes no new requests until it is unloaded", name)
                tenancy.gated_at = now
                self._workers[name].close_gate()
            elif name not in made.gated and tenancy.gated_at is not None and not tenancy.leaving:
                tenancy.gated_at = None
                self._workers[name].open_gate()
        for name, share in made.shrinks:
            self._shrink(self.tenancies[name], share, now)
        for name, share in made.grants:
            self._grant(self._asking[name], share, now)
        if (made.evictions or made.gated or made.shrinks) and (queue := self._queue()):
            queue[0].is_swap |= bool(made.evictions or made.gated)

    def evict(self, name: str, reason: str) -> bool:
        """End an idle worker. False when it has something to do by now."""
        tenancy, worker = self.tenancies[name], self._workers[name]
        if self.is_busy(worker) or not worker.evict():
            return False
        log.info("unloading model %s: %s", name, reason)
        tenancy.leaving = reason
        tenancy.pid, tenancy.available = worker.pid, self.machine.available()
        # What must come back is what it has now.
        tenancy.footprint = sum(map(self.machine.footprint, worker.incarnation.pids)) or tenancy.footprint
        self._events.model_evicted(name, reason)
        return True

    def _grant(self, asking: PendingGrant, share: int, now: float) -> None:
        tenancy = self._tenancy(asking.name, share, asking.need)
        tenancy.asked_at, tenancy.is_swap = asking.since, asking.is_swap
        self.tenancies[asking.name] = tenancy
        asking.answer.set_result(share)
        reason = "swap" if asking.is_swap else "room"
        self._events.memory_granted(asking.name, now - asking.since, reason)
        log.info("model %s is granted %d MiB (%s)", asking.name, share >> 20, reason)

    def _tenancy(self, name: str, share: int, need: Need) -> Allocation:
        return Allocation(name, share, min(share, need.floor), need.most, self._clock(), Pressure(self._limits))

    def _refuse(self, never: Infeasible) -> None:
        asking = self._asking[never.name]
        why = _why(never, self.budget, self._memory.max_loaded)
        log.error("model '%s' cannot be loaded: %s", never.name, why)
        message = f"model '{never.name}' {why}"
        asking.answer.set_exception(ModelUnavailable(Failure(Code.DOES_NOT_FIT, message)))

    # -- shares that change ------------------------------------------------------------------------------------------

    def order(self, tenancy: Allocation, share: int) -> bool:
        """Tell a worker its share, under the measures that are in force. False when it cannot be told."""
        worker, measure = self._workers[tenancy.name], tenancy.pressure.measure
        return worker.incarnation.send(SetMemory(share, measure.kv_part, measure.cache_part))

    def _shrink(self, tenancy: Allocation, share: int, now: float) -> None:
        if self.order(tenancy, share):
            log.info("model %s gives back %d MiB", tenancy.name, (tenancy.share - share) >> 20)
            tenancy.shrinking_to, tenancy.shrink_ends = share, now + SHRINK_DEADLINE_S

    def _end_shrinking(self, tenancy: Allocation, now: float) -> None:
        """Its share is smaller when the worker has said so and it was measured, or as small as it gets in time."""
        target = tenancy.shrinking_to
        if target is None:
            return
        worker = self._workers[tenancy.name]
        worker.incarnation.ping()
        stats = worker.stats
        if stats is not None and stats.share_bytes == target:
            tenancy.footprint = sum(map(self.machine.footprint, worker.incarnation.pids))
            if tenancy.footprint <= target:
                tenancy.share, tenancy.shrinking_to = target, None
                return
        if now >= tenancy.shrink_ends:
            held = max(target, tenancy.footprint) if stats is not None and stats.share_bytes == target else tenancy.held
            log.warning("model %s holds %d MiB, above its target of %d", tenancy.name, held >> 20, target >> 20)
            tenancy.share = tenancy.floor = held
            tenancy.shrinking_to = None

    # -- memory that comes back --------------------------------------------------------------------------------------

    def _collect(self, now: float) -> None:
        """Forget what has come back, and what does not come back in time."""
        for each in list(self._returns):
            left = self.machine.unreturned(each.pid, each.footprint, each.available)
            part = 1.0 if each.footprint == 0 else 1 - left / each.footprint
            if part < RETURNED_PART and now - each.since < RETURN_DEADLINE_S:
                continue
            self._returns.remove(each)
            self._events.memory_returned(each.name, max(0.0, part))
            if part < RETURNED_PART:
                log.error("model %s: %.0f %% of its memory came back", each.name, 100 * part)


def _why(never: Infeasible, budget: int, max_loaded: int) -> str:
    """The numbers behind a refusal."""
    pinned = ", ".join(never.pinned)
    if never.is_full:
        return f"cannot be loaded: max_loaded is {max_loaded}, and as many are pinned ({pinned})."
    need = f"does not fit: it needs {_size(never.need)}, and the memory budget is {_size(budget)}"
    return f"{need}, {_size(budget - never.cap)} of it for pinned models ({pinned})." if pinned else need + "."


def _size(count: int) -> str:
    return f"{count / 1024**3:.1f} GiB" if count >= 1 << 30 else f"{count / 1024**2:.0f} MiB"
