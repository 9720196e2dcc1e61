"""Usage by day, key and model, in a file for each month.

The month that runs is in memory, and written now and then and at the end; older ones are read when they are asked for.
A request is booked once, on the day on which it ends.
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

from gateway.config.periods import begin_of, day_of, next_day, next_month
from gateway.state_dir.snapshot import WriteOrder

log = logging.getLogger(__name__)

# What a crash may lose.
PERIOD_S: Final = 30.0
DIMENSIONS: Final = ("day", "key", "model")


class LedgerLine(Struct, array_like=True):
    """The use of one day, key and model; `requests` are sequences. The key is empty where there was none."""

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
    """One key's use of a period."""

    requests: int = 0
    tokens: int = 0


@dataclass(slots=True)
class _Month:
    """One month's lines and their file. Owned by the ledger."""

    name: str
    file: WriteOrder
    lines: dict[tuple[str, str, str], LedgerLine] = field(default_factory=dict[tuple[str, str, str], LedgerLine])

    def encoded(self) -> bytes:
        return msgspec.json.encode(list(self.lines.values()))


class Ledger:
    """Owned by the event loop."""

    def __init__(
        self,
        folder: Path,
        zone: Callable[[], tzinfo | None] = lambda: None,
        keep_months: Callable[[], int] = lambda: 13,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._zone = zone
        self._keep_months = keep_months
        self._clock = clock
        # Files that should go and cannot be removed, as the log has said.
        self._kept: set[Path] = set()
        self._begins = self._ends = 0.0
        self._day = date.min
        self._by_day: dict[str, LedgerSpending] = {}
        self._by_month: dict[str, LedgerSpending] = {}
        self._month = _Month("", WriteOrder(folder))
        # A month that has ended, until it is written for the last time.
        self._past: list[_Month] = []
        self._roll()

    # -- counting ----------------------------------------------------------------------------------------------------

    def book(self, key: str, model: str, requests: int, prompt: int, cached: int, completion: int) -> None:
        """Count what a request has used."""
        self._roll()
        line = LedgerLine(self._day.isoformat(), key, model, requests, prompt, cached, completion)
        self._add(self._month, line)
        for spent in (self._by_day, self._by_month):
            _spend(spent, line)

    def day(self, key: str) -> LedgerSpending:
        """Usage of a key today."""
        self._roll()
        return self._by_day.get(key) or LedgerSpending()

    def month(self, key: str) -> LedgerSpending:
        """Usage of a key this month."""
        self._roll()
        return self._by_month.get(key) or LedgerSpending()

    def left_s(self, period: str) -> float:
        """Seconds until the `day` or the `month` ends."""
        self._roll()
        first = next_day(self._day) if period == "day" else next_month(self._day)
        return max(1.0, begin_of(first, self._zone()) - self._clock())

    def _roll(self) -> None:
        """Begin another day or month when the clock says so, also when it was set back."""
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
        month = _Month(name, WriteOrder(self._folder / f"{name}.json"))
        for line in _read(month.file.path, is_kept=True):
            self._add(month, line)
        month.file.written = month.encoded()
        return month

    # -- reporting ---------------------------------------------------------------------------------------------------

    async def lines(self, first: date, last: date, by: Sequence[str]) -> list[LedgerLine]:
        """The use of the days from `first` to `last`, one line for each that differs in what is in `by`."""
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

    # -- keeping -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Write what has changed, until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_S)
            for file, number, data in self._changed():
                await asyncio.to_thread(file.write, number, data)
            await asyncio.to_thread(self._forget)

    def close(self) -> None:
        """Write once more, now."""
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
        """Keep the newest months. By number and not by date: a clock that was wrong for a moment costs one of them."""
        for path in self._older()[: -self._keep_months()]:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                if path not in self._kept:
                    log.warning("%s cannot be removed: %s", path, error.strerror or error)
                self._kept.add(path)


def grouped(lines: Iterable[LedgerLine], by: Sequence[str]) -> list[LedgerLine]:
    """The sums of the lines that agree in what is in `by`, in its order; what is not in it is empty."""
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
    """The lines of a month's file; none when it is damaged. One that will be written over is set aside before."""
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
