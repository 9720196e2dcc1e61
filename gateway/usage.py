"""What each key has used, kept over restarts: a small file, written now and then and at the end."""

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from gateway.metrics import Metrics
from gateway.private import write_private

log = logging.getLogger(__name__)

# What a crash may lose.
PERIOD_S: Final = 30.0


class KeyTotals(Struct, frozen=True):
    """One key's counters."""

    requests: dict[str, int] = {}
    rejections: dict[str, int] = {}
    prompt_tokens: int = 0
    generation_tokens: int = 0
    # Seconds since 1970; 0 is never.
    last_used: float = 0.0


class Totals(Struct, frozen=True):
    """The file. `since` is when counting began, in seconds since 1970."""

    since: float
    keys: dict[str, KeyTotals] = {}


def last_used(path: Path) -> dict[str, float]:
    """When each key was used last, as of the newest write of the file; empty when nothing is kept."""
    try:
        totals = msgspec.json.decode(path.read_bytes(), type=Totals)
    except (OSError, msgspec.DecodeError):
        return {}
    return {name: kept.last_used for name, kept in totals.keys.items() if kept.last_used}


class UsageFile:
    """The counters of the keys in `metrics`, and their file. Owned by the event loop."""

    def __init__(self, path: Path, metrics: Metrics, clock: Callable[[], float] = time.time) -> None:
        """Goes on from the file, for the keys that there still are. One that cannot be read is begun anew."""
        self._path = path
        self._metrics = metrics
        self._is_failing = False
        self.since = clock()
        self._written = b""
        # The loop's: how often it looked at the counters.
        self._looks = 0
        # A thread that `run` was cancelled over may still be writing, or be about to: never over what is newer.
        self._lock = threading.Lock()
        self._newest = 0
        self._restore()

    def _restore(self) -> None:
        try:
            totals = msgspec.json.decode(self._path.read_bytes(), type=Totals)
        except FileNotFoundError:
            return
        except (OSError, msgspec.DecodeError) as error:
            log.warning("%s: %s; usage is counted from now on", self._path, error)
            return
        self.since = totals.since
        for name, kept in totals.keys.items():
            # A key that is gone takes its counters with it, so that the file does not grow for ever.
            if (numbers := self._metrics.keys.get(name)) is not None:
                numbers.requests += Counter(kept.requests)
                numbers.rejections += Counter(kept.rejections)
                numbers.prompt_tokens += kept.prompt_tokens
                numbers.generation_tokens += kept.generation_tokens
                numbers.last_used = max(numbers.last_used, kept.last_used)

    async def run(self) -> None:
        """Write what has changed, until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_S)
            look, data = self._look()
            if data != self._written:
                await asyncio.to_thread(self._write, look, data)

    def close(self) -> None:
        """Write once more, now."""
        look, data = self._look()
        if data != self._written:
            self._write(look, data)

    def _look(self) -> tuple[int, bytes]:
        """The file as it should be now, and its place among all that this made."""
        self._looks += 1
        keys = {
            name: KeyTotals(
                dict(numbers.requests),
                dict(numbers.rejections),
                numbers.prompt_tokens,
                numbers.generation_tokens,
                numbers.last_used,
            )
            for name, numbers in self._metrics.keys.items()
        }
        return self._looks, msgspec.json.encode(Totals(self.since, keys)) if keys else b""

    def _write(self, look: int, data: bytes) -> None:
        with self._lock:
            if look > self._newest:
                self._newest = look
                self._replace(data)

    def _replace(self, data: bytes) -> None:
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_private(self._path, data)
        except OSError as error:
            # Once, not every half minute: what is counted stays in memory.
            if not self._is_failing:
                log.warning("usage is not kept: %s: %s", self._path, error.strerror or error)
            self._is_failing = True
        else:
            self._is_failing = False
            self._written = data
