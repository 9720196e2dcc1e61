"""Text of `/metrics`, rendered in steps between which the event loop runs, and with a rate limit."""

import asyncio
import time
from collections.abc import Callable
from typing import Final

from gateway.errors import SERVER, ApiError
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.prometheus import Exposition

# Token bucket of renderings: a burst for several scrapers, and one per period.
BURST: Final = 5.0
PERIOD_S: Final = 1.0


class ScrapeText:
    """Renderer of `/metrics`. One scrape renders, on the event loop, and concurrent ones wait.

    With many models and keys a rendering takes tens of milliseconds, so the loop runs after each family.
    """

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._exposition = Exposition(metrics)
        self._clock = clock
        self._lock = asyncio.Lock()
        # None after a failed rendering.
        self._text: bytes | None = None
        self._allowance = BURST
        self._at = clock()

    async def read(self) -> bytes:
        """Return the current text, or one less than `PERIOD_S` old when the rate limit is reached.

        Raises the exception of a failed rendering, and then `ApiError` until the next rendering.
        """
        async with self._lock:
            now = self._clock()
            self._allowance = min(BURST, self._allowance + (now - self._at) / PERIOD_S)
            self._at = now
            if self._allowance >= 1.0:
                self._allowance -= 1.0
                try:
                    self._text = await self._render()
                except Exception:  # Raised again. An old text must not hide the failure.
                    self._text = None
                    raise
            if self._text is None:
                raise ApiError(500, "The metrics cannot be rendered; the log says why.", type=SERVER, code="internal")
            return self._text

    async def _render(self) -> bytes:
        families: list[bytes] = []
        for family in self._exposition.families():
            families.append(family)
            await asyncio.sleep(0)
        return b"".join(families)
