"""Memory monitor, about once a second: pressure, idle models, unused loans."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from gateway.workers.memory.broker import Broker
from gateway.workers.memory.grants import Allocation
from gateway.workers.memory.policy import LENT_PART
from gateway.workers.supervisor.handle import WorkerHandle
from gateway.workers.supervisor.state import MemoryEvents, State, WorkerLimits
from protocol.failures import Code, Failure

log = logging.getLogger(__name__)

# The machine is short of memory when less than this part of the budget is to be had.
SHORT_PART: Final = 0.01
SHORT_MIN: Final = 256 << 20
# More is lent only when that is worth the message, and not all the time.
LEND_EVERY_S: Final = 10.0
LEND_MIN: Final = 64 << 20
_OVERLOAD: Final = Failure(Code.OUT_OF_MEMORY, "the machine is short of memory; try again")


class MemoryWatch:
    """Measures, and has done what follows. Time and sleep are injected."""

    def __init__(
        self,
        broker: Broker,
        worker_of: Callable[[str], WorkerHandle],
        events: MemoryEvents,
        limits: WorkerLimits,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        self._broker = broker
        self._worker_of = worker_of
        self._events = events
        self._limits = limits
        self._clock = clock
        self._sleep = sleep
        self._recycled: dict[str, float] = {}
        self._lent_at = float("-inf")

    async def run(self) -> None:
        self._events.memory(self._broker.view())
        while True:
            await self._sleep(self._limits.measure_interval_s)
            try:
                await self.look()
            except Exception:  # The root of the task: the next look may be luckier.
                log.exception("internal error while memory was measured")

    async def look(self) -> None:
        """One round."""
        await self._measure()
        now = self._clock()
        broker = self._broker
        is_short = self._is_short()
        for tenancy in list(broker.tenancies.values()):
            worker = self._worker_of(tenancy.name)
            if worker.state is State.READY and not tenancy.leaving:
                self._press(tenancy, worker, now, is_short)
                self._expire(tenancy, worker, now)
        if not broker.has_waiters and not is_short and now - self._lent_at >= LEND_EVERY_S:
            self._lend(now)
        self._events.memory(broker.view())

    async def _measure(self) -> None:
        """In a thread: a large process has many pages to count."""
        machine = self._broker.machine
        pids = {
            tenancy.name: self._worker_of(tenancy.name).incarnation.pids for tenancy in self._broker.tenancies.values()
        }

        def footprints() -> dict[str, int]:
            return {name: sum(map(machine.footprint, own)) for name, own in pids.items() if own}

        for name, footprint in (await asyncio.to_thread(footprints)).items():
            tenancy = self._broker.tenancies.get(name)
            # Another incarnation may have taken its place meanwhile.
            if tenancy is not None and self._worker_of(name).incarnation.pids == pids[name] and not tenancy.leaving:
                tenancy.pid, tenancy.footprint = pids[name][0], footprint

    def _is_short(self) -> bool:
        broker = self._broker
        total = sum(tenancy.footprint for tenancy in broker.tenancies.values())
        low = min(max(SHORT_MIN, int(broker.budget * SHORT_PART)), broker.budget // 10)
        return total > broker.budget or broker.machine.available() < low

    def _press(self, tenancy: Allocation, worker: WorkerHandle, now: float, is_short: bool) -> None:
        pressure = tenancy.pressure
        if pressure.observe(now, tenancy.footprint, tenancy.share, is_short=is_short):
            log.warning(
                "model %s holds %d MiB of its %d MiB%s: measure %d",
                tenancy.name,
                tenancy.footprint >> 20,
                tenancy.share >> 20,
                ", and the machine is short of memory" if is_short else "",
                pressure.level,
            )
            self._broker.order(tenancy, tenancy.shrinking_to or tenancy.share)
            if pressure.level:
                self._events.memory_trimmed(tenancy.name)
        worker.incarnation.overload = _OVERLOAD if pressure.measure.is_refusing else None
        if pressure.is_hopeless(now) and self._may_recycle(tenancy.name, now):
            self._recycled[tenancy.name] = now
            log.warning("model %s is restarted: its memory has grown past its share", tenancy.name)
            self._events.worker_recycled(tenancy.name)
            worker.recycle()

    def _may_recycle(self, name: str, now: float) -> bool:
        newest = max(self._recycled.values(), default=float("-inf"))
        own = self._recycled.get(name, float("-inf"))
        return now - own >= self._limits.recycle_s and now - newest >= self._limits.recycle_gap_s

    def _expire(self, tenancy: Allocation, worker: WorkerHandle, now: float) -> None:
        ttl_s = self._broker.ttl_s(tenancy.name)
        if ttl_s and now - tenancy.used_at >= ttl_s and not self._broker.is_busy(worker):
            self._broker.evict(tenancy.name, "ttl")

    def _lend(self, now: float) -> None:
        """Lend free memory to models with little more than their floor, the most recently used first."""
        broker = self._broker
        spare = min(broker.budget - broker.granted, broker.machine.available())
        for tenancy in sorted(broker.tenancies.values(), key=lambda tenancy: -tenancy.used_at):
            more = min(int(spare * LENT_PART), tenancy.most - tenancy.share)
            loan = tenancy.share - tenancy.floor
            is_calm = tenancy.shrinking_to is None and not tenancy.pressure.level and not tenancy.leaving
            is_ready = self._worker_of(tenancy.name).state is State.READY
            if is_calm and is_ready and more >= max(LEND_MIN, loan) and broker.order(tenancy, tenancy.share + more):
                tenancy.share += more
                spare -= more
                self._lent_at = now
