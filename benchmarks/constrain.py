"""Cost of a constrained row for the rows beside it.

    python -m benchmarks.constrain                       # 5m model, 8 free rows
    python -m benchmarks.constrain 50m --rows 4,16
    python -m benchmarks.constrain qwen3-8b --dtype bfloat16    # on a GPU

The step loop's own batch, without sockets. In turn: free rows alone, with one more free row, with a constrained one
instead, and with a row whose processor waits for its token, as mlx-lm's logits processors would have to. Then the free
rows' tokens per second of each, divided by what they were alone, and by what they were beside one more free row: a
ninth row costs a batch of eight its share of compute whatever it says, so the last ratio is what a grammar costs.
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks import blas, models
from benchmarks.serve import numbers
from gateway.ctl.bench.closed_loop import table

if TYPE_CHECKING:
    import mlx.core as mx

    from worker.engine.batch import Batch
    from worker.engine.row import Row

PROMPT: Final = 32
WARM_TICKS: Final = 12
SLICE: Final = 8
# The schema allows another entry at any time, so a row ends only at its limit of tokens.
SCHEMA: Final = {
    "type": "array",
    "minItems": 100_000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 24},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
}
ALONE: Final = "free rows alone"
BESIDE: Final = "+ a free row"
CASES: Final = (ALONE, BESIDE, "+ a constrained row", "+ a row that waits for its token")


def main() -> None:
    args = _arguments()
    if blas.has_openblas() and "LD_PRELOAD" not in os.environ:
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.constrain", *sys.argv[1:]], blas.environment())
    bench = Bench(args.geometry, args.dtype)
    ticks_s = {rows: bench.run(rows, args.slices) for rows in args.rows}
    if args.json:
        args.json.write_text(json.dumps(ticks_s))
    print(f"{args.geometry} {args.dtype} · BLAS: {blas.describe()} · {args.slices} slices of {SLICE} ticks")
    header = ("free rows", "", "free tok/s", "÷ alone", "÷ beside a free row", "tick ms")
    print(table(header, [line for rows in args.rows for line in _lines(rows, ticks_s[rows])]))


def _lines(rows: int, ticks_s: dict[str, list[float]]) -> list[tuple[str, ...]]:
    medians = {case: statistics.median(ticks_s[case]) for case in CASES}
    alone, beside = medians[ALONE], medians[BESIDE]
    return [
        (str(rows), case, f"{rows / tick:.0f}", f"{alone / tick:.3f}", f"{beside / tick:.3f}", f"{1e3 * tick:.2f}")
        for case, tick in medians.items()
    ]


class Bench:
    """One model, and a new batch for each measurement."""

    def __init__(self, geometry: str, dtype: str) -> None:
        from mlx_lm.models.cache import make_prompt_cache

        from protocol.spec import WorkerSpec
        from worker.kv.spans_and_checkpoints import KvLayout
        from worker.model.loader import load
        from worker.prompt.intake import Intake

        path = str(models.build(geometry, dtype))
        spec = WorkerSpec(name="bench", path=path, epoch=1, down="", up="", dtype=dtype)
        self._loaded = load(spec, lambda *_: None)
        self._intake = Intake(self._loaded)
        self._layout = KvLayout.of(lambda: make_prompt_cache(self._loaded.model))

    def run(self, rows: int, slices: int) -> dict[str, list[float]]:
        """Return the seconds per tick in each slice of each case; the cases take turns, so that noise affects all of
        them.
        """
        ticks = WARM_TICKS + slices * SLICE
        batches = {case: self._batch(case, rows, ticks) for case in CASES}
        for batch in batches.values():
            for _ in range(WARM_TICKS):
                self._tick(batch)
        ticks_s: dict[str, list[float]] = {case: [] for case in CASES}
        for _ in range(slices):
            for case, batch in batches.items():
                start = time.perf_counter()
                tokens = sum(rid < rows for _ in range(SLICE) for rid in self._tick(batch))
                # All free rows get their tokens even in a tick that waits for the constrained row.
                assert tokens == rows * SLICE, (case, tokens)
                ticks_s[case].append((time.perf_counter() - start) / SLICE)
        for batch in batches.values():
            batch.close()
        return ticks_s

    def _batch(self, case: str, rows: int, ticks: int) -> "Batch":
        from worker.engine.batch import Batch
        from worker.prefix_cache.cache_and_eviction import PrefixCache

        batch = Batch(self._loaded.model, self._loaded.eos_ids, PrefixCache(self._layout, 0))
        for rid in range(rows):
            batch.insert(self._row(rid, ticks, ALONE))
        if case != ALONE:
            batch.insert(self._row(rows, ticks, case))
        return batch

    def _tick(self, batch: "Batch") -> list[int]:
        """Run a tick; return the rids of the rows that got a token."""
        tokens = batch.step(512).tokens
        for token in tokens:
            token.row.output.append(token.id)
        return [token.row.rid for token in tokens]

    def _row(self, rid: int, ticks: int, case: str) -> "Row":
        from protocol.to_worker import Constraint, ConstraintKind, Generate, Sampling, TokensPrompt

        prompt = TokensPrompt(tuple(1000 + rid * 7 + at for at in range(PROMPT)))
        row = self._intake.row(
            Generate(rid, prompt, Sampling(temperature=0.8, seed=rid), max_tokens=ticks + WARM_TICKS + 16), 0.0
        )
        if "constrained" in case:
            self._intake.rules.constrain(row, Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(SCHEMA)))
        elif "waits" in case:
            row.processors = [_wait_for_token]
        return row


def _wait_for_token(context: "mx.array", logits: "mx.array") -> "mx.array":
    context[-1].item()
    return logits


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("geometry", nargs="?", default="5m", choices=sorted(models.GEOMETRIES))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--rows", type=numbers, default=[8], help="how many free rows: 4,8,16")
    parser.add_argument("--slices", type=int, default=40)
    parser.add_argument("--json", type=Path, help="write the seconds per tick of each slice here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
