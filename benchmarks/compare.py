"""mlxd beside a bare BatchGenerator loop and mlx_lm.server: the same model, prompts and concurrency in one run.

    make bench                                              # both small models on the CPU, about 20 minutes
    python -m benchmarks.compare --geometry 50m --rounds 1 --concurrency 1,8
    python -m benchmarks.compare --geometry qwen3-8b --dtype bfloat16 --concurrency 1,8,32   # on a GPU

In each round every engine starts anew and is measured at each concurrency, one right after the other, so that noise on
a shared machine hits all alike. A ratio is taken within a round; the table shows the median of the rounds and how far
they lie apart.
"""

import argparse
import os
import platform
import statistics
import sys
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks import blas, models
from benchmarks.engines import Bare, Engine, Mlxd, MlxLmServer, Sample, Unavailable
from benchmarks.measure import spread
from benchmarks.serve import numbers
from benchmarks.words import TokenPrompts, load_tokenizer
from gateway.ctl.bench import closed_loop
from gateway.ctl.bench.closed_loop import BenchRequest, table

MIN_WAVES: Final = 2
MAX_WAVES: Final = 24
WARM_WAVES: Final = 4
# Output of the warm-up after its first wave.
WARM_TOKENS: Final = 8
# Prompt tokens from a prefix cache above this share of all spoil a measurement, and are reported.
CACHED_SHARE: Final = 0.02
LOAD_TIMEOUT_S: Final = 600.0
ENGINES: Final = (Bare.name, Mlxd.name, MlxLmServer.name)


class Cell(msgspec.Struct, frozen=True):
    """One engine at one concurrency. `ratios` are to the bare loop of the same round, and empty if it did not run."""

    engine: str
    concurrency: int
    requests: int
    tokens_per_s: float
    spread: float
    ratio: float | None
    ratios: list[float]
    same_text: float | None
    errors: int
    samples: list[Sample]


class Comparison(msgspec.Struct, frozen=True):
    geometry: str
    dtype: str
    prompt_tokens: int
    output_tokens: int
    rounds: int
    skipped: list[str]
    cells: list[Cell]


def main() -> None:
    args = _arguments()
    print(f"{machine()['cpu']} · BLAS: {blas.describe()} · load average {os.getloadavg()[0]:.1f}", flush=True)
    results: list[Comparison] = []
    for geometry in args.geometry:
        results.append(closed_loop.run(compare(args, geometry)))
        print(as_table(results[-1]), flush=True)
    if args.json:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode({"machine": machine(), "comparisons": results})))
    if any(cell.errors for one in results for cell in one.cells if cell.engine != MlxLmServer.name):
        sys.exit(1)


@dataclass(slots=True)
class Run:
    """One comparison under way. Owned by `compare`."""

    args: argparse.Namespace
    geometry: str
    folder: Path
    # Requests of one measurement, by concurrency; set in the first round.
    requests: dict[int, int] = field(default_factory=dict)
    samples: dict[tuple[str, int], list[Sample]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)


async def compare(args: argparse.Namespace, geometry: str) -> Comparison:
    """Measure all engines in interleaved rounds."""
    run = Run(args, geometry, models.build(geometry, args.dtype))
    for turn in range(args.rounds):
        await _round(run, turn)
    names = [name for name in args.engines if (name, args.concurrency[0]) in run.samples]
    if not names:
        sys.exit("nothing was measured")
    cells = [_cell(run, name, concurrency) for concurrency in args.concurrency for name in names]
    lengths = args.prompt_tokens, args.output_tokens
    return Comparison(geometry, args.dtype, *lengths, args.rounds, list(run.skipped.values()), cells)


async def _round(run: Run, turn: int) -> None:
    """Measure each engine at each concurrency, in fresh processes.

    Where a process's weights happen to lie in memory moves its speed by up to 10 %, so processes and order both change.
    """
    engines = await _start(run, turn)
    try:
        for concurrency in run.args.concurrency:
            await _warm_up(run, engines, concurrency)
        for concurrency in run.args.concurrency:
            for repeat in range(run.args.repeats):
                seed = 100_000 * turn + 1000 * repeat + concurrency
                jobs = _jobs(run, run.requests[concurrency], run.args.output_tokens, seed)
                for engine in engines:
                    if run.args.pin:
                        _pin(engine, run.args.pin, repeat)
                    await _measure(run, engine, jobs, concurrency, turn)
    finally:
        for engine in engines:
            await engine.stop()


def _pin(engine: Engine, cores: int, repeat: int) -> None:
    """Let all threads that compute run on the same few cores for each engine, and on others in the next repeat.

    A thread stays on its core, and cores of a virtual machine differ in speed with the load of their neighbours.
    """
    here = sorted(os.sched_getaffinity(0))
    own = {here[(repeat * cores + at) % len(here)] for at in range(cores)}
    for thread in engine.computing().threads():
        os.sched_setaffinity(thread.id, own)


async def _measure(run: Run, engine: Engine, jobs: list[BenchRequest], concurrency: int, turn: int) -> None:
    sample = await engine.measure(jobs, concurrency)
    if sample.cached_tokens > len(jobs) * run.args.prompt_tokens * CACHED_SHARE:
        print(f"  {engine.name} answered {sample.cached_tokens} prompt tokens from a cache", file=sys.stderr)
    run.samples.setdefault((engine.name, concurrency), []).append(sample)
    what = f"{run.geometry} round {turn + 1}, {concurrency} clients, {engine.name}"
    print(f"  {what}: {sample.tokens_per_s:.1f} tok/s", file=sys.stderr, flush=True)


async def _start(run: Run, turn: int) -> list[Engine]:
    """Start the engines that can run here, with another one first in each round; report the others in `skipped`."""
    names = [name for name in run.args.engines if name not in run.skipped]
    shift = turn % max(1, len(names))
    engines: list[Engine] = []
    for name in names[shift:] + names[:shift]:
        try:
            match name:
                case Bare.name:
                    engine = Bare(run.folder, LOAD_TIMEOUT_S)
                case Mlxd.name:
                    most = max(run.args.concurrency)
                    engine = Mlxd(run.folder, LOAD_TIMEOUT_S, run.args.dtype, most, run.args.speculate)
                case _:
                    engine = MlxLmServer(run.folder, LOAD_TIMEOUT_S)
            await engine.start()
        except Unavailable as why:
            run.skipped[name] = str(why)
            print(why, file=sys.stderr)
        else:
            engines.append(engine)
    return engines


async def _warm_up(run: Run, engines: list[Engine], concurrency: int) -> None:
    """Run uncounted waves on each engine, because a GPU compiles every new shape at its first use, and servers see more
    shapes than the bare loop. The first wave also measures how many requests fill the wanted time.
    """
    is_first = concurrency not in run.requests
    walls: list[float] = []
    for wave in range(WARM_WAVES):
        length = run.args.output_tokens if is_first and wave == 0 else WARM_TOKENS
        jobs = _jobs(run, concurrency, length, seed=-1000 * wave - concurrency)
        times = [(await engine.measure(jobs, concurrency)).wall_s for engine in engines]
        walls = walls or times
    if is_first and walls:
        waves = round(run.args.seconds / min(walls))
        run.requests[concurrency] = concurrency * min(max(waves, MIN_WAVES), MAX_WAVES)


def _jobs(run: Run, count: int, output_tokens: int, seed: int) -> list[BenchRequest]:
    prompts = TokenPrompts(load_tokenizer(run.folder), seed)
    return [BenchRequest(prompts.make(run.args.prompt_tokens), output_tokens) for _ in range(count)]


def _cell(run: Run, name: str, concurrency: int) -> Cell:
    own = run.samples[name, concurrency]
    bare = run.samples.get((Bare.name, concurrency), [])
    speeds = [sample.tokens_per_s for sample in own]
    ratios = [mine.tokens_per_s / theirs.tokens_per_s for mine, theirs in zip(own, bare, strict=False)]
    pairs = [
        (mine.lstrip(), theirs.lstrip())
        for one, other in zip(own, bare, strict=False)
        for mine, theirs in zip(one.texts, other.texts, strict=False)
    ]
    return Cell(
        engine=name,
        concurrency=concurrency,
        requests=run.requests[concurrency],
        tokens_per_s=statistics.median(speeds),
        spread=spread(speeds),
        ratio=statistics.median(ratios) if ratios else None,
        ratios=ratios,
        same_text=sum(mine == theirs for mine, theirs in pairs) / len(pairs) if pairs else None,
        errors=sum(sample.errors for sample in own),
        samples=[msgspec.structs.replace(sample, texts=[]) for sample in own],
    )


def as_table(one: Comparison) -> str:
    """Format tok/s, the ratio to the bare loop, latencies, and CPU time per token."""
    header = (
        "clients",
        "engine",
        "tok/s",
        "±",
        "÷ bare",
        "rounds",
        "TTFT p50",
        "ITL p50",
        "ITL p99",
        "CPU ms/token",
        "client",
        "same text",
    )
    rows: list[list[str]] = []
    for cell in one.cells:
        last = cell.samples[-1]
        total = sum(sample.tokens for sample in cell.samples) or 1
        server = [sum(sample.server_cpu_s[part] for sample in cell.samples) / total * 1000 for part in (0, 1)]
        client = sum(sample.client_cpu_s for sample in cell.samples) / total * 1000
        rows.append(
            [
                str(cell.concurrency),
                cell.engine + (f" ({cell.errors} errors)" if cell.errors else ""),
                f"{cell.tokens_per_s:.1f}",
                f"{cell.spread:.0%}",
                "" if cell.ratio is None else f"{cell.ratio:.3f}",
                "" if not cell.ratios else f"{min(cell.ratios):.2f}–{max(cell.ratios):.2f}",
                f"{last.ttft_ms.p50:.0f}",
                f"{last.itl_ms.p50:.1f}",
                f"{last.itl_ms.p99:.1f}",
                f"{server[0]:.2f}" + (f"+{server[1]:.2f}" if server[1] else ""),
                f"{client:.3f}",
                "" if cell.same_text is None else f"{cell.same_text:.0%}",
            ]
        )
    lengths = f"{one.prompt_tokens} prompt + {one.output_tokens} output tokens"
    title = f"\n{one.geometry} {one.dtype}, {lengths}, greedy, {one.rounds} rounds"
    return "\n".join([title, table(header, rows), *(f"skipped: {why.splitlines()[0]}" for why in one.skipped)])


def machine() -> dict[str, Any]:
    """Describe the machine of this measurement."""
    packages: dict[str, str] = {}
    for name in ("mlx", "mlx-lm", "mlxd"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = "not installed"
    cpu = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    return {"cpu": cpu, "blas": blas.describe(), "packages": packages, "load_average": os.getloadavg()}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--geometry", type=lambda text: text.split(","), default=["5m", "50m"], help=", ".join(models.GEOMETRIES)
    )
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--concurrency", type=numbers, default=[1, 4, 8, 16])
    parser.add_argument("--engines", type=lambda text: text.split(","), default=list(ENGINES), help=",".join(ENGINES))
    parser.add_argument("--prompt-tokens", type=int, default=205)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=1, help="measurements in a round, the engines by turns")
    parser.add_argument("--pin", type=int, default=0, help="run what computes on this many cores, by turns (Linux)")
    parser.add_argument(
        "--speculate",
        default="auto",
        choices=("auto", "off"),
        help="mlxd's drafts: greedy random weights repeat themselves, so auto gains more than on text",
    )
    parser.add_argument("--seconds", type=float, default=12.0, help="about how long one measurement takes")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    args = parser.parse_args()
    for name in args.geometry:
        if name not in models.GEOMETRIES:
            parser.error(f"no geometry {name}; there are {', '.join(models.GEOMETRIES)}")
    for name in args.engines:
        if name not in ENGINES:
            parser.error(f"no engine {name}; there are {', '.join(ENGINES)}")
    return args


if __name__ == "__main__":
    main()
