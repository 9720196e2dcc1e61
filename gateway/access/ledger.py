"""Ledger of usage by day, key and model, in a file for each month.

The current month is in memory and is written periodically and at the end; older months are read on request. A request
counts once, on the day on which it ends.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import date, tzinfo
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from gateway.config.settings import begin_of, day_of, next_day, next_month
from gateway.disk_and_clock import SYSTEM_DISK, Disk
from gateway.state_dir import WriteOrder

log = logging.getLogger(__name__)

# A crash loses at most the usage of this period.
PERIOD_S: Final = 30.0
# Months of usage that are kept, including the current one.
MONTHS_MAX: Final = 13
DIMENSIONS: Final = ("day", "key", "model")


class LedgerLine(Struct, array_like=True):
    """Usage of one key and model on one day. `requests` counts sequences; the key is empty for requests
    without a key.
    """

    day: str
    key: str
    model: str
    requests: int = 0
    prompt: int = 0
    cached: int = 0
    completion: int = 0

    def add(self, other: "LedgerLine") -> None:
        self.requests += other.requests
        self.prompt += other.prompt
        self.cached += other.cached
        self.completion += other.completion


class LedgerSpending(Struct):
    """One key's usage in a period."""

    requests: int = 0
    tokens: int = 0


@dataclass(slots=True)
class _Month:
    """One month's lines and their file. Only the ledger changes it."""

    name: str
    file: WriteOrder
    lines: dict[tuple[str, str, str], LedgerLine] = field(default_factory=dict[tuple[str, str, str], LedgerLine])

    def encoded(self) -> bytes:
        return msgspec.json.encode(list(self.lines.values()))


class Ledger:
    """Usage of all keys. Used on the event loop only."""

    def __init__(
        self,
        folder: Path,
        zone: Callable[[], tzinfo | None] = lambda: None,
        keep_months: int = MONTHS_MAX,
        clock: Callable[[], float] = time.time,
        disk: Disk = SYSTEM_DISK,
    ) -> None:
        self._folder = folder
        self._disk = disk
        self._zone = zone
        self._keep_months = keep_months
        self._clock = clock
        # Expired files that could not be removed. The failure was logged.
        self._kept: set[Path] = set()
        self._begins = self._ends = 0.0
        self._day = date.min
        self._by_day: dict[str, LedgerSpending] = {}
        self._by_month: dict[str, LedgerSpending] = {}
        self._month = _Month("", WriteOrder(folder))
        # Ended months whose last changes are not written yet.
        self._past: list[_Month] = []
        self._roll()

    def record(self, key: str, model: str, requests: int, prompt: int, cached: int, completion: int) -> None:
        """Count the usage of a request."""
        self._roll()
        line = LedgerLine(self._day.isoformat(), key, model, requests, prompt, cached, completion)
        self._add(self._month, line)
        for spent in (self._by_day, self._by_month):
            _spend(spent, line)

    def day(self, key: str) -> LedgerSpending:
        """Return a key's usage today."""
        self._roll()
        return self._by_day.get(key) or LedgerSpending()

    def month(self, key: str) -> LedgerSpending:
        """Return a key's usage this month."""
        self._roll()
        return self._by_month.get(key) or LedgerSpending()

    def left_s(self, period: str) -> float:
        """Return the seconds until the current day or month ends; `period` is `day` or `month`."""
        self._roll()
        first = next_day(self._day) if period == "day" else next_month(self._day)
        return max(1.0, begin_of(first, self._zone()) - self._clock())

    def _roll(self) -> None:
        """Switch to the clock's day and month if they have changed, even if the clock was set back."""
        now, zone = self._clock(), self._zone()
        if self._begins <= now < self._ends:
            return
        self._day = day_of(now, zone)
        self._begins, self._ends = begin_of(self._day, zone), begin_of(next_day(self._day), zone)
        self._by_day = {}
        name = f"{self._day:%Y-%m}"
        if name != self._month.name:
            if self._month.lines:
                self._past.append(self._month)
            self._month = next((past for past in self._past if past.name == name), None) or self._opened(name)
            self._past = [past for past in self._past if past is not self._month]
        self._by_month = {}
        for line in self._month.lines.values():
            _spend(self._by_month, line)
            if line.day == self._day.isoformat():
                _spend(self._by_day, line)

    def _add(self, month: _Month, line: LedgerLine) -> None:
        known = month.lines.setdefault((line.day, line.key, line.model), line)
        if known is not line:
            known.add(line)

    def _opened(self, name: str) -> _Month:
        month = _Month(name, WriteOrder(self._folder / f"{name}.json", self._disk))
        for line in _read(month.file.path, is_kept=True):
            self._add(month, line)
        month.file.written = month.encoded()
        return month

    async def lines(self, first: date, last: date, by: Sequence[str]) -> list[LedgerLine]:
        """Return the usage from the day `first` to the day `last`, grouped by the dimensions in `by`."""
        self._roll()
        held = [*self._past, self._month]
        lines = [msgspec.structs.replace(line) for month in held for line in month.lines.values()]
        paths = {path for path in self._older() if f"{first:%Y-%m}" <= path.stem <= f"{last:%Y-%m}"}
        paths -= {month.file.path for month in held}
        for path in sorted(paths):
            lines += await asyncio.to_thread(_read, path)
        return grouped((line for line in lines if first.isoformat() <= line.day <= last.isoformat()), by)

    def today(self) -> date:
        self._roll()
        return self._day

    async def run(self) -> None:
        """Write changes periodically, until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_S)
            for file, number, data in self._changed():
                await asyncio.to_thread(file.write, number, data)
            await asyncio.to_thread(self._forget)

    def close(self) -> None:
        """Write all changes immediately."""
        for file, number, data in self._changed():
            file.write(number, data)

    def _changed(self) -> list[tuple[WriteOrder, int, bytes]]:
        self._roll()
        changed = [(month.file, month.file.take(), month.encoded()) for month in (*self._past, self._month)]
        self._past = [month for month in self._past if month.file.written != month.encoded()]
        return [each for each in changed if each[2] not in (each[0].written, b"[]")]

    def _older(self) -> list[Path]:
        return sorted(self._folder.glob("[0-9][0-9][0-9][0-9]-[0-9][0-9].json"))

    def _forget(self) -> None:
        """Delete the oldest months beyond the number to keep. A wrong clock thus costs at most one month."""
        for path in self._older()[: -self._keep_months]:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                if path not in self._kept:
                    log.warning("%s cannot be removed: %s", path, error.strerror or error)
                self._kept.add(path)


def grouped(lines: Iterable[LedgerLine], by: Sequence[str]) -> list[LedgerLine]:
    """Sum up lines that agree in the dimensions of `by`, and sort by them. Other dimensions are empty."""
    sums: dict[tuple[str, ...], LedgerLine] = {}
    for line in lines:
        day, key, model = (getattr(line, name) if name in by else "" for name in DIMENSIONS)
        place = tuple({"day": day, "key": key, "model": model}[name] for name in by)
        sums.setdefault(place, LedgerLine(day, key, model)).add(line)
    return [sums[place] for place in sorted(sums)]


def _spend(spent: dict[str, LedgerSpending], line: LedgerLine) -> None:
    own = spent.setdefault(line.key, LedgerSpending())
    own.requests += line.requests
    own.tokens += line.prompt + line.completion


def _read(path: Path, *, is_kept: bool = False) -> list[LedgerLine]:
    """Read a month's file. A damaged file yields no lines, and is moved aside if it would be overwritten."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[LedgerLine])
    except FileNotFoundError:
        return []
    except (OSError, msgspec.DecodeError) as error:
        log.warning("%s: %s; its usage is not counted", path, error)
        if is_kept:
            _set_aside(path)
        return []


def _set_aside(path: Path) -> None:
    try:
        path.rename(path.with_suffix(".damaged"))
    except OSError as error:
        log.error("%s cannot be set aside: %s", path, error.strerror or error)
