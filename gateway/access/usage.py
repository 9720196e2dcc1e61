"""Usage counters of each key. They survive restarts in a small file that is written periodically and at the end."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from gateway.access.rate_limit import Meter
from gateway.disk_and_clock import SYSTEM_DISK, Disk
from gateway.state_dir import WriteOrder
from gateway.telemetry.metrics import KeyMetrics, Metrics

log = logging.getLogger(__name__)

# A crash loses at most the counts of this period.
PERIOD_S: Final = 30.0


class KeyTotals(Struct, frozen=True):
    """One key's counters."""

    requests: dict[str, int] = {}
    rejections: dict[str, int] = {}
    prompt_tokens: int = 0
    generation_tokens: int = 0
    # Unix time of the last use; 0 if the key was never used.
    last_used: float = 0.0
    # Amounts that were missing from the key's token buckets at the Unix time `as_of`.
    missing: dict[str, float] = {}
    as_of: float = 0.0


class Totals(Struct, frozen=True):
    """Content of the usage file. `since` is the Unix time when counting began."""

    since: float
    keys: dict[str, KeyTotals] = {}


def last_used(path: Path) -> dict[str, float]:
    """Return the time of each key's last use, as last written to the file; empty if the file is unusable."""
    try:
        totals = msgspec.json.decode(path.read_bytes(), type=Totals)
    except (OSError, msgspec.DecodeError):
        return {}
    return {name: kept.last_used for name, kept in totals.keys.items() if kept.last_used}


class UsageFile:
    """Counters of the keys in `metrics`, with their file. Used on the event loop only."""

    def __init__(
        self,
        path: Path,
        metrics: Metrics,
        clock: Callable[[], float] = time.time,
        meters: Mapping[str, Meter] | None = None,
        disk: Disk = SYSTEM_DISK,
    ) -> None:
        """Load the counters of existing keys from the file. An unreadable file is replaced."""
        self._file = WriteOrder(path, disk)
        self._metrics = metrics
        self._clock = clock
        # An empty mapping must be kept, as a daemon without keys may get some later.
        self._meters = {} if meters is None else meters
        self.since = clock()
        self._restore()

    def _restore(self) -> None:
        try:
            totals = msgspec.json.decode(self._file.path.read_bytes(), type=Totals)
        except FileNotFoundError:
            return
        except (OSError, msgspec.DecodeError) as error:
            log.warning("%s: %s; usage is counted from now on", self._file.path, error)
            return
        self.since = totals.since
        for name, kept in totals.keys.items():
            # Counters of removed keys are dropped, so that the file does not grow forever.
            if (numbers := self._metrics.keys.get(name)) is not None:
                numbers.requests += Counter(kept.requests)
                numbers.rejections += Counter(kept.rejections)
                numbers.prompt_tokens += kept.prompt_tokens
                numbers.generation_tokens += kept.generation_tokens
                numbers.last_used = max(numbers.last_used, kept.last_used)
                if (meter := self._meters.get(name)) is not None:
                    meter.restore(kept.missing, max(0.0, self._clock() - kept.as_of))

    async def run(self) -> None:
        """Write changes periodically, until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_S)
            number, data = self._file.take(), self._encoded()
            if data != self._file.written:
                await asyncio.to_thread(self._file.write, number, data)

    def close(self) -> None:
        """Write the file immediately."""
        self._file.write(self._file.take(), self._encoded())

    def _encoded(self) -> bytes:
        """Return the file's current content."""
        keys = {name: self._totals(name, numbers) for name, numbers in self._metrics.keys.items()}
        return msgspec.json.encode(Totals(self.since, keys)) if keys else b""

    def _totals(self, name: str, numbers: KeyMetrics) -> KeyTotals:
        meter = self._meters.get(name)
        missing = {} if meter is None else meter.missing()
        return KeyTotals(
            dict(numbers.requests),
            dict(numbers.rejections),
            numbers.prompt_tokens,
            numbers.generation_tokens,
            numbers.last_used,
            missing,
            self._clock() if missing else 0.0,
        )
