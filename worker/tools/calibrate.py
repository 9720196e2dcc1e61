"""Command `python -m worker.tools.calibrate`: measures the speed of a model on this machine.

It measures by rows, prompt length and draft width within a given time, and writes the results where the next worker of
the model reads them. It prints a `protocol.timing_profile.CalibrationResult` per line. Exit statuses are those of a
worker.
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

from protocol.checkpoint import TEXT
from protocol.failures import ExitStatus
from protocol.spec import WorkerSpec, read_spec
from protocol.timing_profile import FOLDER_ENV, Calibration, CalibrationResult, MeasuredSpeed
from worker.embedding.load_model import kind_of_spec
from worker.engine.gauges import Gauges
from worker.engine.inbox import EngineInbox
from worker.engine.load_checks import silent_row
from worker.engine.loop import MAX_CALIBRATED_ROWS, Engine
from worker.errors import LoadFailed
from worker.model import memory
from worker.model.batch_mode import BatchMode
from worker.model.loader import LoadedModel
from worker.model.pass_costs import WIDTHS
from worker.prompt.intake import Intake
from worker.speculation.draft_state import DraftedRow
from worker.speculation.drafter import Drafter
from worker.start.checked_model import load_checked

ROWS: Final = (1, 2, 4, 8, 16, 32, MAX_CALIBRATED_ROWS)
# More rows are only worth the latency if doubling them makes decode at least this many times as fast.
MIN_ROWS_GAIN: Final = 1.1
PROMPT_TOKENS: Final = (512, 2048, 8192)
CHUNK_TOKENS: Final = (32, 128, 512)
# Number of rows that decode during fused prefill, and while the limit of free buffers is measured.
DECODING_ROWS: Final = 4
# The tried limits of free buffers are the machine's memory divided by these numbers, the smallest limit first. A larger
# limit must be faster by `MIN_BUFFER_GAIN`.
BUFFER_DIVISORS: Final = (32, 16, 8, 1)
MIN_BUFFER_GAIN: Final = 1.03
# The five shares divide the given time among the measurements. Time is only checked between measurements, so slow
# models get fewer of them.
DECODE_SHARE: Final = 0.4
PREFILL_SHARE: Final = 0.25
BLOCKS_SHARE: Final = 0.15
FUSED_SHARE: Final = 0.1
BUFFERS_SHARE: Final = 0.1
# Minimum number of steps in a measurement.
STEPS_MIN: Final = 6
# Number of steps before a measurement that are not counted.
WARM_UP_STEPS: Final = 2
DECODE_PROMPT_TOKENS: Final = 48
MAX_OUTPUT_TOKENS: Final = 4096


class _RandomDrafts(Drafter):
    """Random drafts of one width. They are almost always wrong; only the time of their verification matters."""

    def __init__(self, vocab_size: int) -> None:
        self.widest = WIDTHS[-1]
        self.width = 1
        self._vocab_size = vocab_size
        self._random = random.Random(0)

    def is_ready(self, rows: Sequence[DraftedRow], most: Sequence[int]) -> bool:
        return self.width > 1

    def drafts(self, rows: Sequence[DraftedRow], newest: Sequence[int], most: Sequence[int]) -> list[list[int]]:
        return [[self._random.randrange(self._vocab_size) for _ in range(min(self.width - 1, each))] for each in most]


class Bench:
    """Benchmark of one loaded model on the calling thread.

    Its engine is warmed up, and apart from that only stores the measured times. The benchmark has its own batches,
    whose drafts come from `blocks`.
    """

    def __init__(
        self, loaded: LoadedModel, spec: WorkerSpec, engine: Engine, gauges: Gauges, blocks: _RandomDrafts
    ) -> None:
        self._loaded = loaded
        self._engine = engine
        self._kv_limit = gauges.kv_limit
        self._drafts = gauges.speculator is not None
        self._random = random.Random(0)
        self._blocks = blocks
        self._longest = spec.prefill_chunk
        self._batch = engine.new_batch()

    def decode(self, limit_s: float) -> Iterator[MeasuredSpeed]:
        """Measure decode speed for increasing numbers of rows, until more rows gain little."""
        before = 0.0
        for rows in ROWS if self._loaded.plan.mode is not BatchMode.SINGLE else ROWS[:1]:
            if (
                rows > 1
                and self._engine.kv_cost.bytes(rows, DECODE_PROMPT_TOKENS + MAX_OUTPUT_TOKENS // 8) > self._kv_limit
            ):
                return
            self._start(rows)
            steps, seconds = self._steps(limit_s / len(ROWS))
            speed = MeasuredSpeed(rows, rows * steps / seconds)
            yield speed
            if speed.tokens_per_s < MIN_ROWS_GAIN * before:
                return
            before = speed.tokens_per_s

    def blocks(self, limit_s: float) -> None:
        """Measure the verification of drafts of each width."""
        if not self._drafts:
            return
        end = time.perf_counter() + limit_s
        for rows in (1, DECODING_ROWS):
            self._start(rows)
            for width in WIDTHS:
                if width <= WIDTHS[1] or time.perf_counter() < end:
                    self._blocks.width = width
                    self._steps(limit_s / 2 / len(WIDTHS))
            self._blocks.width = 1

    def prefill(self, limit_s: float) -> Iterator[MeasuredSpeed]:
        """Measure prefill speed for increasing prompt lengths, each prompt alone.

        The last prompt ends where the time is over. Its size is the number of its tokens that were processed.
        """
        begin, longest = time.perf_counter(), 0
        for tokens in PROMPT_TOKENS:
            if (
                time.perf_counter() - begin > limit_s
                or tokens > self._loaded.max_context - 8
                or self._engine.kv_cost.bytes(1, tokens) > self._kv_limit
            ):
                return
            self._clear()
            self._insert(tokens)
            began, done = time.perf_counter(), 0
            while self._batch.prefilling and (done == 0 or time.perf_counter() - begin < limit_s):
                done += self._tick(self._longest, done)
            if done > longest:
                # The last token of a prompt runs with the first step.
                size = done if self._batch.prefilling else tokens
                yield MeasuredSpeed(size, done / (time.perf_counter() - began))
                longest = done

    def fused_prefill(self, limit_s: float) -> None:
        """Measure prefill chunks of each size while other rows decode, both fused with their steps and in separate
        passes."""
        if self._loaded.plan.mode is BatchMode.SINGLE:
            return
        end = time.perf_counter() + limit_s
        for tokens, is_fused in product((each for each in CHUNK_TOKENS if each <= self._longest), (True, False)):
            if time.perf_counter() > end:
                return
            self._start(DECODING_ROWS)
            self._insert(min(8 * tokens, self._loaded.max_context - 8))
            own, done = time.perf_counter() + limit_s / len(CHUNK_TOKENS) / 2, 0
            while self._batch.prefilling and (done == 0 or time.perf_counter() < own):
                done += self._tick(tokens, done, is_fused=is_fused)
            self._tick(self._longest, 0)

    def buffers(self, limit_s: float, total: int, device: memory.MlxDevice) -> int:
        """Return the smallest limit of free buffers with which steps are about as fast as with any."""
        best, best_rate = 0, 0.0
        for part in BUFFER_DIVISORS:
            limit = max(memory.usual_buffers() if part == BUFFER_DIVISORS[0] else 0, total // part)
            device.clear_cache()
            device.set_cache_limit(limit)
            self._start(DECODING_ROWS if self._loaded.plan.mode is not BatchMode.SINGLE else 1)
            steps, seconds = self._steps(limit_s / len(BUFFER_DIVISORS))
            if steps / seconds > MIN_BUFFER_GAIN * best_rate:
                best, best_rate = limit, steps / seconds
        return best

    # -- parts -------------------------------------------------------------------------------------------------------

    def _start(self, rows: int) -> None:
        """Start this many rows and run their prefill."""
        self._clear()
        for _ in range(rows):
            self._insert(DECODE_PROMPT_TOKENS)
        while self._batch.prefilling:
            self._tick(self._longest, 0)

    def _steps(self, limit_s: float) -> tuple[int, float]:
        """Run steps until the time is over; return the number of steps and their seconds."""
        for _ in range(WARM_UP_STEPS):
            self._tick(self._longest, 0)
        began, steps = time.perf_counter(), 0
        while steps < STEPS_MIN or time.perf_counter() - began < limit_s:
            self._tick(self._longest, 0)
            steps += 1
            if not self._batch:  # all rows may have ended at their output limit, or sooner if drafts were accepted
                break
        return steps, time.perf_counter() - began

    def _tick(self, chunk: int, context: int, *, is_fused: bool = True) -> int:
        """Run one tick and record its times; return the number of prompt tokens processed."""
        self._engine.pacer.chunk(self._batch.prefilling, self._batch.decoding, chunk, context)
        chunk = min(chunk, self._engine.pacer.policy.most(self._batch.prefilling, self._batch.decoding))
        tick = self._batch.step(chunk, is_fused=is_fused)
        for timed in tick.timed:
            self._engine.pacer.observe(timed)
        return tick.prefilled

    def _insert(self, tokens: int) -> None:
        prompt = [self._random.randrange(self._loaded.vocab_size) for _ in range(tokens)]
        self._batch.insert(silent_row(0, prompt, min(MAX_OUTPUT_TOKENS, self._loaded.max_context - tokens)))

    def _clear(self) -> None:
        self._batch.abandon()
        self._batch.close()
        self._batch = self._engine.new_batch()


def calibrate(spec: WorkerSpec, seconds: float, folder: str, report: Callable[[CalibrationResult], None]) -> None:
    """Measure and write the results. Raises `LoadFailed`, and `OSError` if the results cannot be written."""
    spec = replace(spec, cache_bytes=0, disk_cache_dir="", disk_cache_bytes=0)
    loaded = load_checked(spec, lambda _stage, _done, _total: None)
    writer, gauges, blocks = Intake(loaded, spec.parser).writer, Gauges(), _RandomDrafts(loaded.vocab_size)
    engine = Engine(loaded, spec, EngineInbox(), lambda _message: None, gauges, writer, blocks, keeps=folder)
    engine.warm_up([1] * min(DECODE_PROMPT_TOKENS, loaded.max_context - 4))
    assert engine.kept is not None
    bench = Bench(loaded, spec, engine, gauges, blocks)
    decode, prefill = list[MeasuredSpeed](), list[MeasuredSpeed]()
    for speed in bench.decode(DECODE_SHARE * seconds):
        decode.append(speed)
        report(CalibrationResult("decode", speed.size, speed.tokens_per_s))
    for speed in bench.prefill(PREFILL_SHARE * seconds):
        prefill.append(speed)
        report(CalibrationResult("prefill", speed.size, speed.tokens_per_s))
    bench.blocks(BLOCKS_SHARE * seconds)
    bench.fused_prefill(FUSED_SHARE * seconds)
    buffers = bench.buffers(BUFFERS_SHARE * seconds, memory.allowed(spec), memory.MlxDevice())
    report(CalibrationResult("buffers", buffers))
    most = enough(decode)
    engine.kept.write_calibration(Calibration(time.time(), tuple(decode), tuple(prefill), most, buffers))
    report(CalibrationResult("max_running", most))


def enough(decode: Sequence[MeasuredSpeed]) -> int:
    """Return the smallest number of rows at which doubling gains less than a tenth."""
    for speed, double in pairwise(decode):
        if double.tokens_per_s < MIN_ROWS_GAIN * speed.tokens_per_s:
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
        print(f"{error.failure.message} {error.failure.detail}".strip(), file=sys.stderr)
        return error.exit_status
    except OSError as error:
        print(f"the results cannot be written: {error}", file=sys.stderr)
        return ExitStatus.INTERNAL
    except Exception as error:  # code of any architecture may raise any exception, and memory may be short
        print(f"a measurement failed: {type(error).__name__}: {error}", file=sys.stderr)
        return ExitStatus.INTERNAL
    return ExitStatus.OK


if __name__ == "__main__":
    sys.exit(main())
