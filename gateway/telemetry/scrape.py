"""Text of `/metrics`. It is rendered in steps, between which the event loop runs, and with a rate limit."""

import asyncio
import time
from collections.abc import Callable
from typing import Final

from gateway.errors import SERVER, ApiError
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.prometheus import Exposition

# Renderings are limited by a token bucket: BURST at first, for several scrapers, then one per period.
BURST: Final = 5.0
PERIOD_S: Final = 1.0


class ScrapeText:
    """Renderer of `/metrics` on the event loop. One scrape renders at a time; concurrent scrapes wait.

    With many models and keys a rendering takes tens of milliseconds, so the loop runs other tasks after each family.
    """

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._exposition = Exposition(metrics)
        self._clock = clock
        self._lock = asyncio.Lock()
        # `_text` is None after a failed rendering.
        self._text: bytes | None = None
        self._allowance = BURST
        self._at = clock()

    async def read(self) -> bytes:
        """Return the current text. When the rate limit is reached, the text may be up to `PERIOD_S` old.

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
                except Exception:  # The exception is raised again, because an old text must not hide the failure.
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
