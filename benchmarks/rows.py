"""Rows of unequal lengths, attended to as a worker does: steps and blocks ÷ those of equal rows, quantized KV, ticks.

    python -m benchmarks.rows qwen3-8b --dtype bfloat16                                     # on a GPU
    python -m benchmarks.rows 5m --rows 1,4 --context 64,300 --long 600 --steps 4 --seconds 3

The model has random weights and passes the checks of a load, so that its attention is what a worker would use here.
`mix` runs requests of 40 to 1,200 tokens in and 30 to 300 out through the engine's batch, without HTTP and drafts.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final

from benchmarks import models
from benchmarks.serve import numbers
from benchmarks.tick import AFTER, Loop, checked, random_model, row_of
from gateway.ctl.bench.closed_loop import percentile, table

# Number of steps before a measurement; they compile.
WARM: Final = 8
# Number of tokens per row of a verify block; each row keeps one of them.
BLOCK: Final = 8
# The shortest of several unequal rows has half of the longest row's context.
PROMPTS: Final = (40, 1200)
OUTPUTS: Final = (30, 300)
# A tick above this number of medians is counted as a spike.
SPIKE: Final = 3.0


def main() -> None:
    args = _arguments()
    model, vocab = random_model(args.geometry, args.dtype)
    for name in args.what:
        began = time.perf_counter()
        {"steps": steps, "quantized": quantized, "mix": mix}[name](model, vocab, args)
        print(f"({name}: {time.perf_counter() - began:.0f} s)\n", flush=True)


def steps(model: Any, vocab: int, args: argparse.Namespace) -> None:
    """Measure plain steps of equal and unequal rows, and blocks of unequal rows, in milliseconds."""
    print(f"attention: {checked(model, vocab, 0)}", flush=True)
    lines: list[tuple[str, ...]] = []
    for rows in args.rows:
        for context in args.context:
            equal = _median(_decoding(model, vocab, rows, context, is_equal=True), args.steps)
            unequal = _median(_decoding(model, vocab, rows, context, is_equal=False), args.steps)
            block = _median(_verifying(model, vocab, rows, context), args.steps)
            marks = (f"{1e3 * each:.2f}" for each in (equal, unequal, block))
            lines.append((str(rows), str(context), *marks, f"{unequal / equal:.2f}", f"{block / unequal:.2f}"))
            print(" ".join(lines[-1]), flush=True)
    print(table(("rows", "context", "equal", "unequal", f"blocks of {BLOCK}", "÷ equal", "block ÷ step"), lines))


def quantized(model: Any, vocab: int, args: argparse.Namespace) -> None:
    """Measure a step of one long row whose KV is as computed, and of 8 and 4 bits, in milliseconds."""
    lines: list[tuple[str, ...]] = []
    whole = 0.0
    for bits in (0, 8, 4):
        attention = checked(model, vocab, bits)
        median = _median(_decoding(model, vocab, 1, args.long, is_equal=False), args.steps)
        whole = whole or median
        name = f"{bits} bits" if bits else "as computed"
        lines.append((name, str(args.long), f"{1e3 * median:.2f}", f"{median / whole:.2f}", attention))
        print(" ".join(lines[-1]), flush=True)
    checked(model, vocab, 0)
    print(table(("KV", "context", "step", "÷ as computed", "attention"), lines))


def mix(model: Any, vocab: int, args: argparse.Namespace) -> None:
    """Measure tokens per second and ticks while requests of unequal lengths come and go."""
    print(f"attention: {checked(model, vocab, 0)}", flush=True)
    lines: list[tuple[str, ...]] = []
    for rows in args.rows:
        loop, rng = Loop(model, AFTER), random.Random(rows)

        def insert(rid: int, loop: Loop = loop, rng: random.Random = rng) -> None:
            loop.batch.insert(row_of(rid, rng.randint(*PROMPTS), rng.randint(*OUTPUTS), vocab))

        for rid in range(rows):
            insert(rid)
        for window in range(args.windows):
            tokens, came, ticks = 0, 0, [time.perf_counter()]
            while ticks[-1] - ticks[0] < args.seconds:
                for token in loop.tick():
                    tokens += 1
                    if token.ended is not None:
                        came += 1
                        insert(token.row.rid + rows)
                loop.batch.store_ended()
                ticks.append(time.perf_counter())
            gaps = [after - before for before, after in pairwise(ticks)]
            median = statistics.median(gaps)
            spikes = sum(gap > SPIKE * median for gap in gaps)
            marks = (f"{1e3 * each:.1f}" for each in (median, percentile(gaps, 99), max(gaps)))
            rate = tokens / (ticks[-1] - ticks[0])
            lines.append((str(rows), str(window), f"{rate:.0f}", str(came), *marks, f"{spikes} of {len(gaps)}"))
            print(" ".join(lines[-1]), flush=True)
        loop.batch.abandon()
    print(
        table(("rows", "window", "tokens/s", "answered", "tick p50 ms", "p99", "max", f"over {SPIKE:.0f} × p50"), lines)
    )


def _sequences(model: Any, vocab: int, count: int, context: int, *, is_equal: bool) -> Any:
    """Make rows with random KV."""
    import mlx.core as mx
    from mlx_lm.generate import StopSequences

    from worker.engine.decode_batch import SequenceGroup
    from worker.engine.row import BatchSequence
    from worker.kv import batched
    from worker.kv.quantized import make_caches
    from worker.sampling.sampler import Draws

    heads, dim = model.args.num_key_value_heads, model.args.head_dim
    dtype = model.layers[0].input_layernorm.weight.dtype
    lengths = [context if is_equal else context - at * (context // 2) // count for at in range(count)]
    layers: list[Any] = []
    for layer in range(len(model.layers)):
        column: list[Any] = []
        for length in lengths:
            keys = mx.random.normal((1, heads, length, dim)).astype(dtype)
            cache = make_caches(model)[layer]
            cache.update_and_fetch(keys, keys)
            column.append(cache)
        layers.append(batched.merge([[cache] for cache in column])[0])
        mx.eval(layers[-1].state)
    first = layers[0].lengths
    for layer in layers:
        layer.lengths = first
    rows = [row_of(at, 0, 1 << 20, vocab) for at in range(count)]
    sequences = [
        BatchSequence(row, [[row.rid % vocab]], [], [0] * length, Draws(row.sampling), (), StopSequences().matcher())
        for row, length in zip(rows, lengths, strict=True)
    ]
    return SequenceGroup(sequences, layers)


def _decoding(model: Any, vocab: int, rows: int, context: int, *, is_equal: bool) -> Callable[[], object]:
    from worker.engine.decode_batch import DecodeBatch
    from worker.sampling.sampler import RowSampler
    from worker.speculation.drafter import Drafter

    batch = DecodeBatch(model, RowSampler(), Drafter())
    batch.join(_sequences(model, vocab, rows, context, is_equal=is_equal))
    return batch.decode


def _verifying(model: Any, vocab: int, rows: int, context: int) -> Callable[[], object]:
    import mlx.core as mx

    from worker.engine.forward import ForwardPart, forward
    from worker.kv import batched

    held = _sequences(model, vocab, rows, context, is_equal=False)
    tokens = mx.random.randint(0, vocab, (rows, BLOCK))

    def step() -> None:
        mx.eval(mx.argmax(forward(model, ForwardPart(held.sequences, tokens, held.caches, [BLOCK] * rows)), axis=-1))
        batched.rewind(held.caches, [BLOCK - 1] * rows)

    return step


def _median(step: Callable[[], object], count: int) -> float:
    """Return the median seconds from the end of one step to the end of the next."""
    for _ in range(WARM):
        step()
    times = [time.perf_counter()]
    for _ in range(count):
        step()
        times.append(time.perf_counter())
    return statistics.median(after - before for before, after in pairwise(times))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.rows", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("geometry", nargs="?", default="50m", choices=[*models.GEOMETRIES])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--what", type=lambda text: text.split(","), default=["steps", "quantized", "mix"])
    parser.add_argument("--rows", type=numbers, default=[1, 8, 32])
    parser.add_argument("--context", type=numbers, default=[500, 4000], help="tokens of the longest row")
    parser.add_argument("--long", type=int, default=65_536, help="tokens of the row whose KV is quantized")
    parser.add_argument("--steps", type=int, default=30, help="of one measurement")
    parser.add_argument("--seconds", type=float, default=10.0, help="of one window of the mix")
    parser.add_argument("--windows", type=int, default=3, help="of the mix; the first ones warm up")
    return parser.parse_args()


if __name__ == "__main__":
    main()
