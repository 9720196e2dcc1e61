"""Steps and chunks of rows with adapters beside rows of the base, by turns, on one model.

    python -m benchmarks.adapters                                     # a small geometry, for a CPU
    python -m benchmarks.adapters qwen3-8b --dtype bfloat16 --rows 1,8,32 --chunk 512

Weights are random and stay in memory; so do the adapters, of one rank on each linear layer. `none` is the model before
any adapter is loaded, `base` the same rows once some are, `one` all rows with one of them, `mixed` rows of several and
of the base. On a CPU times are CPU time. A chunk is without the head, which a prompt has no use for.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable
from typing import Any, Final

from benchmarks import models
from benchmarks.serve import numbers
from benchmarks.tick import random_model
from gateway.ctl.bench.closed_loop import table

ADAPTERS: Final = 4
WARM: Final = 4


def main() -> None:
    args = _arguments()
    model, vocab = random_model(args.geometry, args.dtype)
    print(f"adapters · {args.geometry} {args.dtype}, rank {args.rank}", flush=True)
    before = {shape: _milliseconds(model, vocab, shape, args.steps) for shape in _shapes(args)}
    began = time.perf_counter()
    adapters, size = _load(model, args.rank)
    print(f"{ADAPTERS} adapters: {size >> 20} MiB in {time.perf_counter() - began:.1f} s", flush=True)
    lines: list[tuple[str, ...]] = []
    for shape in _shapes(args):
        rows = shape[0]
        chosen = {"base": [0] * rows, "one": [1] * rows, "mixed": [row % (ADAPTERS + 1) for row in range(rows)]}
        times = {"none": before[shape]}
        for name, slots in chosen.items():
            with adapters.slots.rows([slots], [shape]):
                times[name] = _milliseconds(model, vocab, shape, args.steps)
        ratios = (f"{times[name]:.2f} (× {times[name] / times['none']:.3f})" for name in chosen)
        lines.append((str(rows), str(shape[1]), f"{times['none']:.2f}", *ratios))
    print(table(("rows", "tokens", "none ms", "base", "one", "mixed"), lines), flush=True)


def _shapes(args: argparse.Namespace) -> list[tuple[int, int]]:
    """Return the shapes of the measured passes: steps with each number of rows, and a chunk of one row."""
    return [*((rows, 1) for rows in args.rows), (1, args.chunk)]


def _milliseconds(model: Any, vocab: int, shape: tuple[int, int], steps: int) -> float:
    """Return the median time of a forward pass over new caches, which grow with each pass."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    run = model if shape[1] == 1 else model.model
    caches = make_prompt_cache(model)
    tokens = mx.random.randint(0, vocab, shape)
    clock = _clock()
    times: list[float] = []
    for _ in range(WARM + steps):
        start = clock()
        mx.eval(run(tokens, caches)[:, -1])
        times.append((clock() - start) * 1e3)
    return statistics.median(times[WARM:])


def _load(model: Any, rank: int) -> tuple[Any, int]:
    """Load random adapters into the first slots of each linear layer; return them with their bytes."""
    import mlx.core as mx

    from worker.model.linears import Linears
    from worker.model.lora.adapters import AdaptedLinear, Matrices, Slots, StackedWeights, dtype_of
    from worker.model.packing import packing_of

    packing = packing_of(model)
    slots, size = Slots(packing.turn if packing is not None else None), 0
    linears = Linears(model)
    for place in filter(None, map(linears.find, dict(model.named_modules()))):
        linear = place.holder[place.key]
        dtype = dtype_of(model, linear)
        shapes = (place.inputs, rank), (rank, place.outputs)
        updates: dict[int, Matrices] = {}
        for slot in range(1, ADAPTERS + 1):
            a, b = ((mx.random.normal(shape) / math.sqrt(shape[0])).astype(dtype) for shape in shapes)
            updates[slot] = Matrices(a, b)
        bank = StackedWeights.of(updates)
        place.holder[place.key] = AdaptedLinear(linear, place, slots, bank)
        size += bank.nbytes
    return slots, size


def _clock() -> Callable[[], float]:
    import mlx.core as mx

    return time.process_time if mx.default_device() == mx.Device(mx.cpu) else time.perf_counter


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.adapters", description=__doc__)
    parser.add_argument("geometry", nargs="?", default="5m", choices=models.GEOMETRIES)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rows", type=numbers, default=[1, 8])
    parser.add_argument("--chunk", type=int, default=16, help="tokens of a prompt's chunk")
    parser.add_argument("--steps", type=int, default=20)
    return parser.parse_args()


if __name__ == "__main__":
    main()
