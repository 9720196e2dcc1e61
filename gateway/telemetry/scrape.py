"""Text of `/metrics` as scrapers get it: rendered with turns of the event loop in between, and not at every scrape."""

import asyncio
import time
from collections.abc import Callable
from typing import Final

from gateway.errors import SERVER, ApiError
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.prometheus import Exposition

# Renderings that may follow one another at once, for several scrapers; beyond them there is one a second.
BURST: Final = 5.0
PERIOD_S: Final = 1.0


class ScrapeText:
    """Rendered by one scrape at a time, on the loop, which alone may read the numbers. Other scrapes wait for it.

    Many models and keys make a rendering take tens of milliseconds: the loop has its turn after each family.
    """

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._exposition = Exposition(metrics)
        self._clock = clock
        self._lock = asyncio.Lock()
        # None after a rendering that failed.
        self._text: bytes | None = None
        self._allowance = BURST
        self._at = clock()
        self.renderings = 0

    async def read(self) -> bytes:
        """The text of now, or of less than `PERIOD_S` ago while there are more scrapes than renderings.

        Raises what a rendering raises, and `ApiError` until the next one when it has failed.
        """
        async with self._lock:
            now = self._clock()
            self._allowance = min(BURST, self._allowance + (now - self._at) / PERIOD_S)
            self._at = now
            if self._allowance >= 1.0:
                self._allowance -= 1.0
                try:
                    self._text = await self._render()
                except Exception:  # Whatever a rendering raises: raised again, and no old text is served for it.
                    self._text = None
                    raise
            if self._text is None:
                raise ApiError(500, "The metrics cannot be rendered; the log says why.", type=SERVER, code="internal")
            return self._text

    async def _render(self) -> bytes:
        self.renderings += 1
        families: list[bytes] = []
        for family in self._exposition.families():
            families.append(family)
            await asyncio.sleep(0)
        return b"".join(families)
