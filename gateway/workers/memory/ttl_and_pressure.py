"""Memory monitor, which runs about once a second: memory pressure, TTLs of idle models, loans of unused memory."""

import asyncio
import logging
from typing import Final

from gateway.workers.memory.broker import Allocation, Broker
from gateway.workers.memory.policy import LENT_PART
from gateway.workers.supervisor.state import MemoryEvents, State, WorkerLimits
from gateway.workers.supervisor.worker import WorkerHandle
from protocol.failures import Code, Failure

log = logging.getLogger(__name__)

# The machine is short of memory if less is free than SHORT_MIN_BYTES or this fraction of the budget, whichever is more.
SHORT_PART: Final = 0.01
SHORT_MIN_BYTES: Final = 256 << 20
LEND_INTERVAL_S: Final = 10.0
LEND_MIN_BYTES: Final = 64 << 20
_OVERLOAD: Final = Failure(Code.OUT_OF_MEMORY, "the machine is short of memory; try again")


class MemoryWatch:
    """Measures the footprints of workers, relieves pressure, evicts idle models and lends unused memory."""

    def __init__(self, broker: Broker, events: MemoryEvents, limits: WorkerLimits) -> None:
        self._broker = broker
        self._events = events
        self._limits = limits
        self._recycled_at: dict[str, float] = {}
        self._lent_at = float("-inf")

    async def run(self) -> None:
        self._events.memory(self._broker.view())
        while True:
            await asyncio.sleep(self._limits.measure_interval_s)
            try:
                await self._check()
            except Exception:  # The loop must go on after any error.
                log.exception("internal error while memory was measured")

    async def _check(self) -> None:
        await self._measure()
        broker = self._broker
        now = broker.clock()
        is_short = self._is_short()
        for allocation in list(broker.allocations.values()):
            worker = broker.workers[allocation.name]
            if worker.state is State.READY and not allocation.evict_reason:
                self._press(allocation, worker, now, is_short)
                self._expire(allocation, worker, now)
        if not broker.has_waiters and not is_short and now - self._lent_at >= LEND_INTERVAL_S:
            self._lend(now)
        self._events.memory(broker.view())

    async def _measure(self) -> None:
        """Measure the workers' footprints in a thread, because counting the pages of a large process takes long."""
        machine, workers, allocations = self._broker.machine, self._broker.workers, self._broker.allocations
        pids = {name: workers[name].process.pids for name in allocations}

        def footprints() -> dict[str, int]:
            return {name: sum(map(machine.footprint, own)) for name, own in pids.items() if own}

        for name, footprint in (await asyncio.to_thread(footprints)).items():
            allocation = allocations.get(name)
            # The worker's process may have been replaced during the measurement.
            is_same = allocation is not None and workers[name].process.pids == pids[name]
            if allocation is not None and is_same and not allocation.evict_reason:
                allocation.pid, allocation.footprint = pids[name][0], footprint

    def _is_short(self) -> bool:
        broker = self._broker
        total = sum(allocation.footprint for allocation in broker.allocations.values())
        low = min(max(SHORT_MIN_BYTES, int(broker.budget * SHORT_PART)), broker.budget // 10)
        return total > broker.budget or broker.machine.available() < low

    def _press(self, allocation: Allocation, worker: WorkerHandle, now: float, is_short: bool) -> None:
        pressure = allocation.pressure
        if pressure.observe(now, allocation.footprint, allocation.memory_bytes, is_short=is_short):
            log.warning(
                "model %s holds %d MiB of its %d MiB%s: measure %d",
                allocation.name,
                allocation.footprint >> 20,
                allocation.memory_bytes >> 20,
                ", and the machine is short of memory" if is_short else "",
                pressure.level,
            )
            self._broker.send_grant(allocation, allocation.shrinking_to or allocation.memory_bytes)
            if pressure.level:
                self._events.memory_trimmed(allocation.name)
        worker.process.overload = _OVERLOAD if pressure.measure.is_refusing else None
        if pressure.is_hopeless(now) and self._may_recycle(allocation.name, now):
            self._recycled_at[allocation.name] = now
            log.warning("model %s is restarted: its memory has grown past its grant", allocation.name)
            self._events.worker_recycled(allocation.name)
            worker.recycle()

    def _may_recycle(self, name: str, now: float) -> bool:
        newest = max(self._recycled_at.values(), default=float("-inf"))
        own = self._recycled_at.get(name, float("-inf"))
        return now - own >= self._limits.recycle_s and now - newest >= self._limits.recycle_gap_s

    def _expire(self, allocation: Allocation, worker: WorkerHandle, now: float) -> None:
        ttl_s = self._broker.ttl_s(allocation.name)
        if ttl_s and now - allocation.used_at >= ttl_s and not self._broker.is_busy(worker):
            self._broker.evict(allocation.name, "ttl")

    def _lend(self, now: float) -> None:
        """Lend free memory to models that have little more than their floor, to the most recently used first."""
        broker = self._broker
        spare = min(broker.budget - broker.granted, broker.machine.available())
        for allocation in sorted(broker.allocations.values(), key=lambda allocation: -allocation.used_at):
            more = min(int(spare * LENT_PART), allocation.most - allocation.memory_bytes)
            loan = allocation.memory_bytes - allocation.floor
            is_calm = allocation.shrinking_to is None and not allocation.pressure.level and not allocation.evict_reason
            is_ready = broker.workers[allocation.name].state is State.READY
            is_worthwhile = more >= max(LEND_MIN_BYTES, loan)
            if is_calm and is_ready and is_worthwhile and broker.send_grant(allocation, allocation.memory_bytes + more):
                allocation.memory_bytes += more
                spare -= more
                self._lent_at = now
