"""Gate for requests of batches: whether they may start now, so that they take nothing from other requests."""

import asyncio
import time
from collections.abc import Callable
from typing import Final

from gateway.request.admission import Admission
from gateway.workers.pool.pool import Pool
from gateway.workers.power.battery_and_display import is_on_battery, run_tool

POLL_S: Final = 0.25
POWER_INTERVAL_S: Final = 30.0
# A model that finds no room is looked at again after this time, because the look reads its files.
ROOM_INTERVAL_S: Final = 5.0


class BatchGate:
    """Decides on the event loop. A worker that has other requests preempts those of batches by itself."""

    def __init__(
        self,
        admission: Admission,
        pool: Pool,
        on_battery: Callable[[], bool] = lambda: is_on_battery(run_tool),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_battery` is called in a thread."""
        self._admission = admission
        self._pool = pool
        self._on_battery = on_battery
        self._clock = clock
        self._read_at = float("-inf")
        self._is_on_battery = False
        # Times until which models that found no room are not asked for again.
        self._full_until: dict[str, float] = {}

    async def is_open(self) -> bool:
        """Whether no other request runs or waits, no model waits for memory, and the machine has mains power."""
        now = self._clock()
        if now - self._read_at >= POWER_INTERVAL_S:
            self._read_at = now
            self._is_on_battery = await asyncio.to_thread(self._on_battery)
        admission = self._admission
        return admission.is_idle and not (admission.takes_none or self._is_on_battery or self._pool.memory().waiting)

    async def admits(self, model: str) -> bool:
        """Whether a request of a batch may start on this model: no other model may be unloaded for it."""
        if not await self.is_open() or self._clock() < self._full_until.get(model, 0.0):
            return False
        fits = await self._pool.fits(model)
        if not fits:
            self._full_until[model] = self._clock() + ROOM_INTERVAL_S
        return fits
