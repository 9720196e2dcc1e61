"""`python -m worker.tools.calibrate`: how quick is a model here, by rows, by length of prompt and by width of drafts?

Loads the model, measures within a given time, and writes the results where the next worker of the model looks for
them. Prints a `protocol.timing_profile.CalibrationResult` a line. Exit statuses are those of a worker.
"""

import argparse
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, product
from typing import Final

import msgspec
from msgspec.structs import replace

from protocol.failures import ExitStatus, Failure
from protocol.kinds import TEXT
from protocol.spec import WorkerSpec, read_spec
from protocol.timing_profile import FOLDER_ENV, Calibration, CalibrationResult, MeasuredSpeed
from worker.embedding.load_model import kind_of_spec
from worker.engine.gauges import Gauges
from worker.engine.inbox import EngineInbox
from worker.engine.load_checks.silent_row import silent_row
from worker.engine.loop import Engine
from worker.errors import LoadFailed
from worker.model import memory
from worker.model.batch_mode import BatchMode
from worker.model.loader import LoadedModel
from worker.prompt.intake import Intake
from worker.speculation.draft_state import DraftedRow
from worker.speculation.drafter import NoDrafts
from worker.speculation.policy.draft_width import WIDTHS, StepCosts
from worker.start.checked_model import load_checked

ROWS: Final = (1, 2, 4, 8, 16, 32, 64)
# Twice as many rows that gain less than this are not worth their latency.
GAIN: Final = 1.1
PROMPTS: Final = (512, 2048, 8192)
CHUNKS: Final = (32, 128, 512)
# Rows that generate while chunks ride on their steps, and while the limit of free buffers is tried.
BESIDE: Final = 4
# Parts of the machine's memory, the smallest first; a larger one has to be quicker by this much.
BUFFER_PARTS: Final = (32, 16, 8, 1)
BUFFER_GAIN: Final = 1.03
# Parts of the time that is given, which is kept between two measurements, not inside of one: where a chunk takes
# seconds, there are fewer of them. Each has so many steps at least, and before them so many that do not count.
DECODE_PART: Final = 0.4
PREFILL_PART: Final = 0.25
BLOCKS_PART: Final = 0.15
RIDING_PART: Final = 0.1
BUFFERS_PART: Final = 0.1
STEPS_MIN: Final = 6
WARM: Final = 2
PROMPT: Final = 48
OUTPUT: Final = 4096


class _Blocks(NoDrafts):
    """Drafts of one width at random, whose tokens are wrong but for luck: what counts is how long steps take."""

    def __init__(self, vocab_size: int) -> None:
        self.widest = WIDTHS[-1]
        self.width = 1
        self.costs: StepCosts | None = None
        self._vocab_size = vocab_size
        self._random = random.Random(0)

    def is_ready(self, rows: Sequence[DraftedRow], most: Sequence[int]) -> bool:
        return self.width > 1

    def drafts(self, rows: Sequence[DraftedRow], newest: Sequence[int], most: Sequence[int]) -> list[list[int]]:
        return [[self._random.randrange(self._vocab_size) for _ in range(min(self.width - 1, each))] for each in most]

    def timed(self, rows: int, width: int, seconds: float) -> None:
        if self.costs is not None:
            self.costs.observe(rows, width, seconds)


class Bench:
    """Measurements of one loaded model, on the calling thread. The engine is warm, does nothing else, and keeps what is
    learned; its batches draft by `blocks`."""

    def __init__(self, loaded: LoadedModel, spec: WorkerSpec, engine: Engine, gauges: Gauges, blocks: _Blocks) -> None:
        self._loaded = loaded
        self._engine = engine
        self._kv_limit = gauges.kv_limit
        self._random = random.Random(0)
        self._blocks = blocks
        self._longest = spec.prefill_chunk
        self._batch = engine.new_batch()

    def decode(self, limit_s: float) -> Iterator[MeasuredSpeed]:
        """Tokens a second of more and more rows, until more of them gain little."""
        before = 0.0
        for rows in ROWS if self._loaded.plan.lane is not BatchMode.SINGLE else ROWS[:1]:
            if rows > 1 and self._engine.kv_cost.bytes(rows, PROMPT + OUTPUT // 8) > self._kv_limit:
                return
            self._start(rows)
            steps, seconds = self._steps(limit_s / len(ROWS))
            speed = MeasuredSpeed(rows, rows * steps / seconds)
            yield speed
            if speed.tokens_per_s < GAIN * before:
                return
            before = speed.tokens_per_s

    def blocks(self, limit_s: float) -> None:
        """Steps with drafts of each width, for the widths that pay."""
        if self._blocks.costs is None:
            return
        end = time.perf_counter() + limit_s
        for rows in (1, BESIDE):
            self._start(rows)
            for width in WIDTHS:
                if width <= WIDTHS[1] or time.perf_counter() < end:
                    self._blocks.width = width
                    self._steps(limit_s / 2 / len(WIDTHS))
            self._blocks.width = 1

    def prefill(self, limit_s: float) -> Iterator[MeasuredSpeed]:
        """Tokens a second of prompts of more and more tokens, each alone."""
        begin = time.perf_counter()
        for tokens in PROMPTS:
            if (
                time.perf_counter() - begin > limit_s
                or tokens > self._loaded.max_context - 8
                or self._engine.kv_cost.bytes(1, tokens) > self._kv_limit
            ):
                return
            self._clear()
            self._insert(tokens)
            began, done = time.perf_counter(), 0
            while self._batch.prefilling and (done == 0 or time.perf_counter() - began < limit_s / len(PROMPTS)):
                done += self._tick(self._longest, done)
            yield MeasuredSpeed(tokens, done / (time.perf_counter() - began))

    def riding(self, limit_s: float) -> None:
        """Chunks beside rows that generate, of each size and both ways."""
        if self._loaded.plan.lane is BatchMode.SINGLE:
            return
        end = time.perf_counter() + limit_s
        for tokens, rides in product((each for each in CHUNKS if each <= self._longest), (True, False)):
            if time.perf_counter() > end:
                return
            self._start(BESIDE)
            self._insert(min(8 * tokens, self._loaded.max_context - 8))
            own, done = time.perf_counter() + limit_s / len(CHUNKS) / 2, 0
            while self._batch.prefilling and (done == 0 or time.perf_counter() < own):
                done += self._tick(tokens, done, rides=rides)
            self._tick(self._longest, 0)

    def buffers(self, limit_s: float, total: int, device: memory.Device) -> int:
        """The smallest limit of free buffers with which steps are about as quick as with any."""
        best, best_rate = 0, 0.0
        for part in BUFFER_PARTS:
            limit = max(memory.usual_buffers() if part == BUFFER_PARTS[0] else 0, total // part)
            device.clear_cache()
            device.set_cache_limit(limit)
            self._start(BESIDE if self._loaded.plan.lane is not BatchMode.SINGLE else 1)
            steps, seconds = self._steps(limit_s / len(BUFFER_PARTS))
            if steps / seconds > BUFFER_GAIN * best_rate:
                best, best_rate = limit, steps / seconds
        return best

    # -- parts -------------------------------------------------------------------------------------------------------

    def _start(self, rows: int) -> None:
        """So many rows past their prompts."""
        self._clear()
        for _ in range(rows):
            self._insert(PROMPT)
        while self._batch.prefilling:
            self._tick(self._longest, 0)

    def _steps(self, limit_s: float) -> tuple[int, float]:
        """Steps until the time is over, and the seconds that they took."""
        for _ in range(WARM):
            self._tick(self._longest, 0)
        began, steps = time.perf_counter(), 0
        while steps < STEPS_MIN or time.perf_counter() - began < limit_s:
            self._tick(self._longest, 0)
            steps += 1
            if not self._batch:  # outputs have an end, drafts that are right bring it nearer
                break
        return steps, time.perf_counter() - began

    def _tick(self, chunk: int, context: int, *, rides: bool = True) -> int:
        """One tick, from which the times are learned; prompt tokens that it has processed."""
        self._engine.pacer.chunk(self._batch.prefilling, self._batch.decoding, chunk, context)
        tick = self._batch.step(chunk, rides=rides)
        for timed in tick.timed:
            self._engine.pacer.observe(timed.seconds, timed.prompted, timed.rows, rode=timed.rode)
        return tick.prefilled

    def _insert(self, tokens: int) -> None:
        prompt = [self._random.randrange(self._loaded.vocab_size) for _ in range(tokens)]
        self._batch.insert(silent_row(0, prompt, min(OUTPUT, self._loaded.max_context - tokens)))

    def _clear(self) -> None:
        self._batch.abandon()
        self._batch.close()
        self._batch = self._engine.new_batch()


def calibrate(spec: WorkerSpec, seconds: float, folder: str, tell: Callable[[CalibrationResult], None]) -> None:
    """Measure and write. Raises `LoadFailed`, and `OSError` where the results cannot be written."""
    spec = replace(spec, cache_bytes=0, disk_cache_dir="", disk_cache_bytes=0)
    loaded = load_checked(spec, lambda _stage, _done, _total: None)
    writer, gauges, blocks = Intake(loaded, spec.parser).writer, Gauges(), _Blocks(loaded.vocab_size)
    engine = Engine(loaded, spec, EngineInbox(), lambda _message: None, gauges, writer, blocks, keeps=folder)
    engine.warm_up([1] * min(PROMPT, loaded.max_context - 4))
    assert engine.kept is not None
    blocks.costs = engine.kept.costs
    bench = Bench(loaded, spec, engine, gauges, blocks)
    decode, prefill = list[MeasuredSpeed](), list[MeasuredSpeed]()
    for speed in bench.decode(DECODE_PART * seconds):
        decode.append(speed)
        tell(CalibrationResult("decode", speed.size, speed.tokens_per_s))
    for speed in bench.prefill(PREFILL_PART * seconds):
        prefill.append(speed)
        tell(CalibrationResult("prefill", speed.size, speed.tokens_per_s))
    bench.blocks(BLOCKS_PART * seconds)
    bench.riding(RIDING_PART * seconds)
    buffers = bench.buffers(BUFFERS_PART * seconds, memory.allowed(spec), memory.MlxDevice())
    tell(CalibrationResult("buffers", buffers))
    most = enough(decode)
    engine.kept.calibrated(Calibration(time.time(), tuple(decode), tuple(prefill), most, buffers))
    tell(CalibrationResult("max_running", most))


def enough(decode: Sequence[MeasuredSpeed]) -> int:
    """The smallest number of rows from which twice as many gain less than a tenth."""
    for speed, double in pairwise(decode):
        if double.tokens_per_s < GAIN * speed.tokens_per_s:
            return speed.size
    return decode[-1].size


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="worker.tools.calibrate", description="Speed of a model on this machine.")
    parser.add_argument("--spec", required=True, help="a WorkerSpec as JSON; - reads it from standard input")
    parser.add_argument("--seconds", type=float, default=60.0, help="time for all measurements together, about")
    options = parser.parse_args(argv)
    spec, folder = read_spec(options.spec), os.environ.get(FOLDER_ENV, "")
    if not folder:
        print(f"worker.tools.calibrate: {FOLDER_ENV} names no folder for the results", file=sys.stderr)
        return ExitStatus.BAD_CONFIG
    try:
        memory.prepare_load()
        if kind_of_spec(spec) != TEXT:
            print(f"model '{spec.name}' generates no text: there is nothing to calibrate", file=sys.stderr)
            return ExitStatus.BAD_CONFIG
        calibrate(spec, options.seconds, folder, lambda each: print(msgspec.json.encode(each).decode(), flush=True))
    except LoadFailed as error:
        print(_say(error.failure), file=sys.stderr)
        return error.exit_status
    except OSError as error:
        print(f"the results cannot be written: {error}", file=sys.stderr)
        return ExitStatus.INTERNAL
    except Exception as error:  # the boundary to code of every architecture, and to memory that is not there
        print(f"a measurement failed: {type(error).__name__}: {error}", file=sys.stderr)
        return ExitStatus.INTERNAL
    return ExitStatus.OK


def _say(failure: Failure) -> str:
    return f"{failure.message} {failure.detail}".strip()


if __name__ == "__main__":
    sys.exit(main())
