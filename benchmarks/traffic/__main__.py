"""Requests of unequal lengths: mlxd with drafts and without, a bare BatchGenerator loop, and other servers.

    python -m benchmarks.traffic                                                # the demo model, on this machine
    python -m benchmarks.traffic --model 5m --lists uniform,chat --rates 0.5     # random weights, and Poisson arrivals
    python -m benchmarks.traffic --model smollm2 --lists chat,edit,agent         # real weights, real text
    python -m benchmarks.traffic --model llama-8b --dtype bfloat16 --clients 1,8,32 --out DIR --limit 90    # on a GPU
    python -m benchmarks.traffic --show DIR                                      # the table of what is there

Every engine gets the same list of requests (`benchmarks.traffic.lengths`), the bare loop in the same order. One engine
runs at a time, and each record is written to DIR/records.jsonl as soon as it is measured; runs into one DIR add up, and
the newest record of an engine and a point counts. On a CPU a run fails where mlxd's text is not the bare loop's.
"""

import argparse
import os
import subprocess
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks import blas, models
from benchmarks.bare import NEVER_S
from benchmarks.engines import Bare, Mlxd, MlxLmServer, MlxVlmServer, Server, VllmMlx
from benchmarks.fetched import Unavailable
from benchmarks.serve import numbers
from benchmarks.traffic import lengths, records
from benchmarks.traffic.drive import Load, drive
from benchmarks.traffic.records import Place, Point, Record
from benchmarks.traffic.texts import Conversations, PagesAndSources, Texts, Words, requests_of
from benchmarks.words import load_tokenizer
from gateway.ctl.bench import closed_loop
from tests.real.prepare import SMOLLM2, SMOLLM2_BF16

DEMO: Final = "demo"
# Models of real weights that `make test-real` makes, by data type.
REAL: Final = {"smollm2": {"float32": SMOLLM2, "bfloat16": SMOLLM2_BF16}}
LOAD_TIMEOUT_S: Final = 600.0
# A list has this many requests per client, within the two bounds below.
REQUESTS_A_CLIENT: Final = 3
FEWEST: Final = 12
MOST: Final = 96
# Maximum number of running rows with Poisson arrivals.
POISSON_ROWS: Final = 32
POISSON_WARM: Final = 4
# Output tokens of each request of the warm-up.
WARM_TOKENS: Final = 32
# Tokens of the model's context that are reserved for the template.
TEMPLATE_TOKENS: Final = 64


@dataclass(frozen=True, slots=True)
class Subject:
    """Model that is served."""

    name: str
    folder: Path
    dtype: str
    room: int
    tokenizer: Any

    def texts(self, name: str, seed: int) -> Texts:
        """Return the writer of a list's prompts."""
        if self.name in REAL:
            return PagesAndSources(self.tokenizer, name, seed)
        return Conversations(self.tokenizer, seed) if self.name == DEMO else Words(self.tokenizer, seed)


ENGINES: Final[dict[str, Callable[[Subject, int], Bare | Server]]] = {
    "bare": lambda model, _: Bare(model.folder, LOAD_TIMEOUT_S),
    "mlxd": lambda model, rows: Mlxd(model.folder, LOAD_TIMEOUT_S, model.dtype, rows),
    "mlxd-off": lambda model, rows: Mlxd(model.folder, LOAD_TIMEOUT_S, model.dtype, rows, "off"),
    "mlx_lm": lambda model, _: MlxLmServer(model.folder, LOAD_TIMEOUT_S),
    "vllm-mlx": lambda model, _: VllmMlx(model.folder, LOAD_TIMEOUT_S),
    "mlx-vlm": lambda model, _: MlxVlmServer(model.folder, LOAD_TIMEOUT_S),
}
DEFAULT: Final = ("bare", "mlxd", "mlxd-off", "mlx_lm")


def main() -> None:
    args = _arguments()
    if args.show:
        print(records.as_table(records.read(args.show / records.FILE)))
        return
    place = Place.here(_device(), _command(sys.argv[1:]))
    print(f"{place.device} · load average {os.getloadavg()[0]:.1f}", flush=True)
    subject = _subject(args.model, args.dtype)
    for name in args.engines:
        try:
            closed_loop.run(_measure(args, subject, name, place))
        except Unavailable as why:
            print(f"{name}: {why}", file=sys.stderr, flush=True)
    measured = records.read(args.out / records.FILE)
    print(records.as_table(measured))
    if wrong := records.unequal(measured):
        sys.exit("\n".join(wrong))


async def _measure(args: argparse.Namespace, subject: Subject, name: str, place: Place) -> None:
    """Measure one engine at each point. It is restarted after a run with errors, or one that the limit stopped."""
    engine: Bare | Server | None = None
    clients: list[int] = args.clients
    rows = max(*clients, POISSON_ROWS if args.rates else 1)
    try:
        for point in _points(args, subject):
            if engine is None:
                engine = await _started(name, subject, rows)
            warm = await drive(engine, _warm_up(args, subject, point), subject.tokenizer)
            if not all(outcome and outcome.finished for outcome in warm.outcomes):
                print(f"{name}: the limit stopped the requests before {point.name}, {point.load}", file=sys.stderr)
                await engine.stop()
                engine = await _started(name, subject, rows)
            run = await drive(engine, _load(args, subject, point, rows), subject.tokenizer)
            record = records.record(name, point, run, place)
            records.append(args.out, record)
            _tell(record)
            if record.errors or record.stopped:
                await engine.stop()
                engine = None
    finally:
        if engine is not None:
            await engine.stop()


async def _started(name: str, subject: Subject, rows: int) -> Bare | Server:
    engine = ENGINES[name](subject, rows)
    await engine.start()
    return engine


def _points(args: argparse.Namespace, subject: Subject) -> list[Point]:
    """Return the points: lists by numbers of clients, then by rates."""
    points: list[Point] = []
    for name in args.lists:
        for clients in args.clients:
            count = args.requests or min(MOST, max(FEWEST, REQUESTS_A_CLIENT * clients))
            points.append(Point(subject.name, subject.dtype, name, clients, 0.0, args.seed, count, args.scale))
        for rate in args.rates:
            count = args.requests or MOST
            points.append(Point(subject.name, subject.dtype, name, 0, rate, args.seed, count, args.scale))
    return points


def _load(args: argparse.Namespace, subject: Subject, point: Point, rows: int) -> Load:
    """Make the list of one point. Lengths depend on the seed alone; no two points share a text."""
    drawn = lengths.sessions(point.name, point.seed, point.requests, point.clients, point.scale, subject.room)
    texts = subject.texts(point.name, _seed(point, "measured"))
    due = lengths.arrivals(point.seed, len(drawn), point.rate) if point.rate else []
    return Load(requests_of(texts, drawn), point.clients or rows, due, args.limit or NEVER_S)


def _warm_up(args: argparse.Namespace, subject: Subject, point: Point) -> Load:
    """Make one request per client, from the same distribution, with short answers: a GPU compiles new shapes."""
    clients = point.clients or POISSON_WARM
    drawn = lengths.sessions(point.name, point.seed + 1, clients, clients, point.scale, subject.room)
    first = [
        (lengths.Turn(turn.added, min(turn.max_tokens, WARM_TOKENS)),) for turn, *_ in drawn[: args.warmup or clients]
    ]
    texts = subject.texts(point.name, _seed(point, "warm"))
    return Load(requests_of(texts, first), clients, [], args.limit or NEVER_S)


def _seed(point: Point, use: str) -> int:
    return zlib.crc32(f"{point.seed} {point.name} {point.load} {use}".encode())


def _tell(one: Record) -> None:
    finished = f"{one.finished} of {len(one.answers)} finished"
    where = f"{one.point.name}, {one.point.load}, {one.engine}"
    print(f"  {where}: {one.tokens_per_s:.1f} tok/s, {finished}, {one.wall_s:.1f} s", file=sys.stderr, flush=True)


def _subject(name: str, dtype: str) -> Subject:
    """Find a model by its name or the name of its shape, or a folder. Exits if there is none."""
    if name == DEMO:
        folder, dtype = models.demo(), "float32"
    elif name in REAL:
        folder = REAL[name].get(dtype, Path())
        if not (folder / "config.json").exists():
            sys.exit(f"no {name} in {dtype}: `make test-real` makes {' and '.join(REAL[name])}")
    elif name in models.GEOMETRIES:
        folder = models.build(name, dtype)
    elif (folder := Path(name).resolve()).is_dir():
        dtype = "auto"
    else:
        sys.exit(f"no model {name}: there are {DEMO}, {', '.join([*REAL, *models.GEOMETRIES])}, and folders")
    config = msgspec.json.decode((folder / "config.json").read_bytes(), type=_Config)
    return Subject(name, folder, dtype, config.max_position_embeddings - TEMPLATE_TOKENS, load_tokenizer(folder))


class _Config(msgspec.Struct):
    max_position_embeddings: int = 32768


def _command(words: list[str]) -> str:
    """Return the command without the folder of the records, so that it gives them anywhere."""
    kept = [word for before, word in pairwise(["", *words]) if "--out" not in (word.partition("=")[0], before)]
    return " ".join(["python -m benchmarks.traffic", *kept])


def _device() -> str:
    """Return the device that MLX computes on, asked in a child process: the device's memory is for the engines."""
    code = "import mlx.core as mx; print(mx.default_device(), mx.device_info().get('device_name', ''))"
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, env=blas.environment(), capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown device"


def _names(known: Callable[[], Any]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        if unknown := [name for name in text.split(",") if name not in known()]:
            raise argparse.ArgumentTypeError(f"no {', '.join(unknown)}; there are {', '.join(known())}")
        return text.split(",")

    return parse


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="traffic", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=DEMO, help=f"{DEMO}, a folder, or {', '.join([*REAL, *models.GEOMETRIES])}")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"), help="of weights")
    parser.add_argument("--engines", type=_names(lambda: ENGINES), default=list(DEFAULT), help=",".join(ENGINES))
    parser.add_argument(
        "--lists", type=_names(lambda: lengths.LISTS), default=["uniform"], help=",".join(lengths.LISTS)
    )
    parser.add_argument("--clients", type=numbers, default=[1, 4, 8, 16, 32], help="such as 1,8,32")
    parser.add_argument("--rates", type=_rates, default=[], help="sessions that arrive a second, such as 0.5,2")
    parser.add_argument("--requests", type=int, default=0, help="of a list (default: 3 a client, 12 to 96)")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies every length")
    parser.add_argument("--warmup", type=int, default=0, help="requests before each list (default: one a client)")
    parser.add_argument("--limit", type=float, default=0.0, help="seconds after which a run is stopped (default: none)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=blas.CACHE / "traffic", help="folder of the records")
    parser.add_argument(
        "--show", type=Path, metavar="DIR", help="print the table of the records there, and run nothing"
    )
    return parser.parse_args()


def _rates(text: str) -> list[float]:
    values = [float(part) for part in text.split(",")]
    if min(values) <= 0:
        raise argparse.ArgumentTypeError("must be above 0")
    return values


if __name__ == "__main__":
    main()
