"""mlxd beside a bare BatchGenerator loop and mlx_lm.server: the same model, prompts and concurrency in one run.

    make bench                                              # both small models on the CPU, about 20 minutes
    python -m benchmarks.compare --geometry 50m --rounds 1 --concurrency 1,8
    python -m benchmarks.compare --geometry qwen3-8b --dtype bfloat16 --concurrency 1,8,32        # on a GPU

In each round every engine is measured at each concurrency, one right after the other, so that noise on a shared machine
hits all alike. A ratio is taken within a round; the table shows the median of the rounds and how far they lie apart.
"""

import argparse
import os
import platform
import statistics
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks import blas, models
from benchmarks.client import run
from benchmarks.engines import Bare, Engine, Mlxd, MlxLmServer, Sample, Unavailable
from benchmarks.load import Job
from benchmarks.measure import spread, table
from benchmarks.serve import numbers
from benchmarks.words import Prompts

MIN_WAVES: Final = 2
MAX_WAVES: Final = 24
LOAD_TIMEOUT_S: Final = 600.0
ENGINES: Final = (Bare.name, Mlxd.name, MlxLmServer.name)


class Cell(msgspec.Struct, frozen=True):
    """One engine at one concurrency. `ratios` are to the bare loop of the same round; empty when that did not run."""

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
        results.append(run(compare(args, geometry)))
        print(as_table(results[-1]), flush=True)
    if args.json:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode({"machine": machine(), "comparisons": results})))
    if any(cell.errors for one in results for cell in one.cells if cell.engine != MlxLmServer.name):
        sys.exit(1)


async def compare(args: argparse.Namespace, geometry: str) -> Comparison:
    """Start every engine, measure in interleaved rounds, stop them."""
    folder = models.build(geometry, args.dtype)
    engines, skipped = await _start(args, folder)
    samples: dict[tuple[str, int], list[Sample]] = {}
    requests: dict[int, int] = {}
    try:
        for concurrency in args.concurrency:
            requests[concurrency] = await _warm_up(args, engines, folder, concurrency)
        for turn in range(args.rounds):
            for concurrency in args.concurrency:
                jobs = _jobs(args, folder, requests[concurrency], seed=1000 * turn + concurrency)
                shift = turn % len(engines)
                for engine in engines[shift:] + engines[:shift]:
                    sample = await engine.measure(jobs, concurrency)
                    samples.setdefault((engine.name, concurrency), []).append(sample)
                    print(
                        f"  round {turn + 1} {geometry} c={concurrency} {engine.name}: {sample.tokens_per_s:.1f} tok/s",
                        file=sys.stderr,
                    )
    finally:
        for engine in engines:
            await engine.stop()
    cells = [
        _cell(engine.name, concurrency, requests[concurrency], samples)
        for concurrency in args.concurrency
        for engine in engines
    ]
    return Comparison(geometry, args.dtype, args.prompt_tokens, args.output_tokens, args.rounds, skipped, cells)


async def _start(args: argparse.Namespace, folder: Path) -> tuple[list[Engine], list[str]]:
    """The engines that run here, and why the others do not."""
    engines: list[Engine] = []
    skipped: list[str] = []
    for name in args.engines:
        try:
            match name:
                case Bare.name:
                    engine = Bare(folder, LOAD_TIMEOUT_S)
                case Mlxd.name:
                    engine = Mlxd(folder, LOAD_TIMEOUT_S, args.dtype, max(args.concurrency))
                case _:
                    engine = MlxLmServer(folder, LOAD_TIMEOUT_S)
            await engine.start()
        except Unavailable as why:
            skipped.append(str(why))
            print(why, file=sys.stderr)
        else:
            engines.append(engine)
    if not engines:
        sys.exit("nothing to measure")
    return engines, skipped


async def _warm_up(args: argparse.Namespace, engines: list[Engine], folder: Path, concurrency: int) -> int:
    """One uncounted wave for each engine; the number of requests that fill the wanted time."""
    jobs = _jobs(args, folder, concurrency, seed=-concurrency)
    walls = [(await engine.measure(jobs, concurrency)).wall_s for engine in engines]
    waves = round(args.seconds / walls[0])
    return concurrency * min(max(waves, MIN_WAVES), MAX_WAVES)


def _jobs(args: argparse.Namespace, folder: Path, count: int, seed: int) -> list[Job]:
    from transformers import AutoTokenizer

    prompts = Prompts(AutoTokenizer.from_pretrained(folder), seed)
    return [Job(prompts.make(args.prompt_tokens), args.output_tokens) for _ in range(count)]


def _cell(name: str, concurrency: int, requests: int, samples: dict[tuple[str, int], list[Sample]]) -> Cell:
    own = samples[name, concurrency]
    bare = samples.get((Bare.name, concurrency), [])
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
        requests=requests,
        tokens_per_s=statistics.median(speeds),
        spread=spread(speeds),
        ratio=statistics.median(ratios) if ratios else None,
        ratios=ratios,
        same_text=sum(mine == theirs for mine, theirs in pairs) / len(pairs) if pairs else None,
        errors=sum(sample.errors for sample in own),
        samples=[msgspec.structs.replace(sample, texts=[]) for sample in own],
    )


def as_table(one: Comparison) -> str:
    """tok/s, the ratio to the bare loop, and where the time of a token goes."""
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
    """What the numbers belong to."""
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
