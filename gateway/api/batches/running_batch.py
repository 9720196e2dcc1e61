"""A batch that has not ended: its lines that wait, run and have ended."""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Final

from msgspec import structs

from gateway.api.batches.batch_folder import ERRORS, INPUT, OUTPUT
from gateway.api.batches.batch_store import BatchStore
from gateway.api.batches.input_lines import InputLine, LinePlace, ScannedInput, read_line, scan
from gateway.api.batches.line_results import unserved_line
from gateway.api.batches.records import (
    FILE_PREFIX,
    LineProblem,
    Outcome,
    Status,
    StoredBatch,
    StoredFile,
    new_name,
)

# A line whose model cannot be used so often ends with that error.
FAILURES_MAX: Final = 10
_UNREADABLE: Final = LineProblem("invalid_file", "The input file cannot be read.")


class RunningBatch:
    """Owner of a batch's lines. Used on the event loop by the runner."""

    def __init__(self, batch: StoredBatch, store: BatchStore, wall: Callable[[], float] = time.time) -> None:
        self.batch = batch
        self._store = store
        self._wall = wall
        self.is_open = False
        self._waiting: dict[str, deque[LinePlace]] = {}
        # Tasks of the lines that run, by the line's id.
        self.running: dict[str, asyncio.Task[None]] = {}
        self.models: Counter[str] = Counter()
        # Number of results that are being written.
        self.writing = 0
        self.counts: Counter[str] = Counter()
        # Number of times that a line was refused because its model could not be used.
        self._failures: Counter[str] = Counter()
        # Time on the loop's clock before which no line is started.
        self.not_before = 0.0
        # Set once no more lines are started: the outcome of those that were not run.
        self.stopped: Outcome | None = "canceled" if batch.status == "cancelling" else None

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def waiting_models(self) -> list[str]:
        """Models for which lines wait."""
        return [model for model, lines in self._waiting.items() if lines]

    @property
    def is_settled(self) -> bool:
        """Whether no line runs, and none will be started."""
        return not self.running and not self.writing and (self.stopped is not None or not self.waiting)

    def view(self) -> StoredBatch:
        """Return the batch with the current counts."""
        return structs.replace(self.batch, counts=dict(self.counts)) if self.is_open else self.batch

    async def open(self, line_bytes_max: int) -> None:
        """Check the input file, and find the lines without a result. Ends the batch if the file has problems."""
        folder, batch = self._store.folder, self.batch
        if batch.output_file or batch.error_file:
            # An earlier daemon has all results, and was about to make files of them.
            self.counts, self.is_open = Counter(batch.counts), True
            return
        path = folder.part(batch.id, INPUT)

        def look() -> ScannedInput:
            try:
                return scan(path, batch.endpoint, line_bytes_max)
            except FileNotFoundError:
                return ScannedInput([], [_UNREADABLE])

        scanned = await self._store.run(look)
        if scanned.problems:
            self.batch = structs.replace(self.batch, problems=tuple(scanned.problems))
            await self._change("failed")
            return
        written = await self._store.run(lambda: folder.results(batch.id))
        self.counts = Counter(written.outcomes.values())
        for line in scanned.lines:
            if line.custom_id not in written.outcomes:
                self._waiting.setdefault(line.model, deque()).append(line)
        self.is_open = True
        # The batch may have been cancelled meanwhile.
        self.batch = structs.replace(self.batch, total=len(scanned.lines), model=scanned.model)
        if self.batch.status == "validating":
            await self._change("in_progress")

    def next_line(self, model: str) -> LinePlace:
        return self._waiting[model].popleft()

    def may_retry(self, line: LinePlace, status: int) -> bool:
        """Whether a refused line is tried again. A model that cannot be used may stay so, a key's limit does not."""
        self._failures[line.custom_id] += status == 503
        return self._failures[line.custom_id] < FAILURES_MAX

    def put_back(self, line: LinePlace) -> None:
        """Let a line wait again that was not answered."""
        self._waiting.setdefault(line.model, deque()).appendleft(line)

    async def read(self, line: LinePlace) -> InputLine:
        folder = self._store.folder
        return await self._store.run(lambda: read_line(folder.part(self.batch.id, INPUT), line))

    async def keep(self, outcome: Outcome, result: bytes) -> None:
        """Write a result. Raises `Unavailable` if it is not written."""
        suffix = OUTPUT if outcome == "succeeded" else ERRORS
        self.writing += 1
        try:
            await self._store.run(lambda: self._store.folder.write_result(self.batch.id, suffix, result))
        finally:
            self.writing -= 1
        self._store.grow(self.batch.id, len(result))
        self.counts[outcome] += 1

    async def cancel(self) -> None:
        """Start no more lines, and abort those that run."""
        if self.stopped is None:
            self.stopped = "canceled"
            await self._change("cancelling")
            self.abort()

    def expire(self) -> None:
        """Start no more lines, and abort those that run, because the completion window is over."""
        self.stopped = "expired"
        self.abort()

    def abort(self) -> None:
        """Abort the lines that run. They wait again."""
        for task in self.running.values():
            task.cancel()

    async def end(self) -> None:
        """Write the results of lines that were not run, and end the batch. May be repeated if it fails."""
        if self.stopped is None and self.batch.status != "finalizing":
            await self._change("finalizing")
        for model in self.waiting_models:
            while self._waiting[model]:
                custom_id, outcome = self._waiting[model][0].custom_id, self.stopped or "expired"
                await self.keep(outcome, unserved_line(custom_id, outcome, self.batch.is_anthropic))
                self._waiting[model].popleft()
        await self._make_files()
        status: Status = "expired" if self.counts["expired"] else "completed"
        await self._change("cancelled" if self.stopped == "canceled" else status)
        await self._store.drop_input(self.batch)

    async def _make_files(self) -> None:
        """Make the results files of the tenant. Their ids are stored first, so that a crash loses none of them."""
        batch, counts, folder = self.batch, self.counts, self._store.folder
        if not (batch.output_file or batch.error_file):
            await self._store.run(lambda: folder.sync_results(batch.id))
            tokens = (await self._store.run(lambda: folder.results(batch.id))).tokens
            has_errors = counts.total() > counts["succeeded"]
            batch = structs.replace(batch, counts=dict(counts), tokens=tokens)
            if not batch.is_anthropic:
                output = new_name(FILE_PREFIX) if counts["succeeded"] else ""
                errors = new_name(FILE_PREFIX) if has_errors else ""
                batch = structs.replace(batch, output_file=output, error_file=errors)
            self.batch = batch
            await self._store.update(batch)
        now, age_s = self._wall(), batch.output_age_s
        for suffix, name, kind in ((OUTPUT, batch.output_file, "output"), (ERRORS, batch.error_file, "error")):
            if name and name not in self._store.files:
                record = StoredFile(
                    id=name,
                    tenant=batch.tenant,
                    purpose="batch_output",
                    filename=f"{batch.id}_{kind}.jsonl",
                    size_bytes=0,
                    created=now,
                    expires=None if age_s is None else now + age_s,
                )
                await self._store.add_results(batch, suffix, record)

    async def _change(self, status: Status) -> None:
        reached = {**self.batch.reached, status: self._wall()}
        self.batch = structs.replace(self.batch, status=status, reached=reached)
        await self._store.update(self.batch)
