"""Records of runs, one JSON object a line, and the table and the cells of the picture that are made of them."""

import hashlib
import os
import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import msgspec

from benchmarks import blas
from benchmarks.engines import Drafts
from benchmarks.traffic.drive import Run
from gateway.ctl.bench.closed_loop import Summary, summarize_ms, table

BARE: Final = "bare"
MLXD: Final = ("mlxd", "mlxd-off")
FILE: Final = "records.jsonl"
HEADER: Final = (
    "list", "load", "engine", "tok/s", "÷ bare", "TTFT p50", "p99", "ITL p50", "p99", "CPU ms/token", "cached",
    "drafts right", "finished", "same",
)  # fmt: skip


class Point(msgspec.Struct, frozen=True):
    """Load of a run: a list by so many clients in a closed loop, or at a Poisson rate; the other one is 0."""

    model: str
    dtype: str
    name: str
    clients: int
    rate: float
    seed: int
    requests: int
    scale: float = 1.0

    @property
    def load(self) -> str:
        return f"{self.rate:g}/s" if self.rate else str(self.clients)


class Record(msgspec.Struct, frozen=True):
    """One engine at one point. `answers` are digests of the texts of finished requests, and empty for other requests.

    `tokens_per_s` includes the tokens of requests that the limit stopped.
    """

    engine: str
    point: Point
    device: str
    packages: dict[str, str]
    load_average: float
    command: str
    finished: int
    stopped: int
    errors: int
    prompt_tokens: int
    cached_tokens: int
    tokens: int
    wall_s: float
    cpu_s: float
    tokens_per_s: float
    ttft_ms: Summary
    itl_ms: Summary
    answers: list[str]
    first_errors: list[str]
    drafts: Drafts = Drafts()

    @property
    def key(self) -> tuple[str, Point]:
        return self.engine, self.point


class Place(msgspec.Struct, frozen=True):
    """Place and settings of a measurement."""

    device: str
    packages: dict[str, str]
    command: str

    @classmethod
    def here(cls, device: str, command: str) -> "Place":
        packages: dict[str, str] = {}
        for name in ("mlx", "mlx-lm", "mlx-vlm", "mlxd"):
            try:
                packages[name] = version(name)
            except PackageNotFoundError:
                continue
        cpu = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
        arithmetic = f"; BLAS: {blas.describe()}" if "cpu" in device else ""
        return cls(f"{device}; {cpu}{arithmetic}", packages, command)


def record(engine: str, point: Point, run: Run, place: Place) -> Record:
    """Fold a run into one record."""
    sent = [outcome for outcome in run.outcomes if outcome is not None]
    good = [outcome for outcome in sent if not outcome.error]
    tokens = sum(outcome.tokens for outcome in good)
    failures = [outcome.error for outcome in sent if outcome.error]
    finished = sum(outcome.finished for outcome in good)
    return Record(
        engine=engine,
        point=point,
        device=place.device,
        packages=place.packages,
        load_average=round(os.getloadavg()[0], 2),
        command=place.command,
        finished=finished,
        stopped=len(run.outcomes) - finished - len(failures),
        errors=len(failures),
        prompt_tokens=sum(outcome.prompt_tokens for outcome in good),
        cached_tokens=sum(outcome.cached_tokens for outcome in good),
        tokens=tokens,
        wall_s=round(run.wall_s, 3),
        cpu_s=round(run.cpu_s, 3),
        tokens_per_s=round(tokens / run.wall_s, 2),
        ttft_ms=summarize_ms([outcome.ttft_s for outcome in good if outcome.ttft_s is not None]),
        itl_ms=summarize_ms([gap for outcome in good for gap in outcome.gaps_s]),
        answers=[digest(outcome.text) if outcome and outcome.finished else "" for outcome in run.outcomes],
        first_errors=list(dict.fromkeys(failures))[:3],
        drafts=run.drafts,
    )


def digest(text: str) -> str:
    """Return a short digest of a text; servers differ in whether a first space counts."""
    return hashlib.sha256(text.lstrip().encode()).hexdigest()[:10]


def same(one: Record, other: Record) -> float | None:
    """Return the share of requests finished by both that have the same text; None without any."""
    pairs = [(a, b) for a, b in zip(one.answers, other.answers, strict=False) if a and b]
    return sum(a == b for a, b in pairs) / len(pairs) if pairs else None


def unequal(records: Sequence[Record]) -> list[str]:
    """Return a line for each record of mlxd on a CPU whose texts differ from the bare loop's. On a GPU, kernels round
    by shape.
    """
    bare = {one.point: one for one in records if one.engine == BARE}
    lines: list[str] = []
    for one in records:
        if one.engine in MLXD and one.point in bare and one.device.startswith("Device(cpu"):
            share = same(one, bare[one.point])
            if share is not None and share < 1:
                where = f"{one.point.name}, {one.point.load}, {one.engine}"
                lines.append(f"{where}: only {share:.1%} of texts are the bare loop's")
    return lines


def append(folder: Path, one: Record) -> None:
    """Append a record as soon as it is measured."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / FILE).open("ab") as file:
        file.write(msgspec.json.encode(one) + b"\n")


def read(path: Path) -> list[Record]:
    """Return the newest record of each engine and point, in the order of their first records."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    newest = {one.key: one for one in (msgspec.json.decode(line, type=Record) for line in lines if line)}
    return list(newest.values())


def rows(records: Sequence[Record]) -> list[list[str]]:
    """Return the cells of the table, by list and load, with engines in the order of their measurement."""
    bare = {one.point: one for one in records if one.engine == BARE}
    points = sorted({one.point for one in records}, key=_order)
    return [_cells(one, bare.get(point)) for point in points for one in records if one.point == point]


def as_table(records: Sequence[Record]) -> str:
    """Format tables for people, one for each model."""
    parts: list[str] = []
    for model, dtype in dict.fromkeys((one.point.model, one.point.dtype) for one in records):
        own = [one for one in records if (one.point.model, one.point.dtype) == (model, dtype)]
        parts += [f"\n{model} {dtype}, greedy; {own[-1].device}", table(HEADER, rows(own)), *_remarks(own)]
    return "\n".join(parts)


def _order(point: Point) -> tuple[object, ...]:
    return point.model, point.dtype, point.name, point.rate, point.clients, point.requests, point.scale, point.seed


def _cells(one: Record, bare: Record | None) -> list[str]:
    equal = same(one, bare) if bare else None
    total = one.finished + one.stopped + one.errors
    return [
        one.point.name,
        one.point.load,
        one.engine,
        f"{one.tokens_per_s:.1f}",
        f"{one.tokens_per_s / bare.tokens_per_s:.3f}" if bare and bare.tokens_per_s else "-",
        f"{one.ttft_ms.p50:.0f}",
        f"{one.ttft_ms.p99:.0f}",
        f"{one.itl_ms.p50:.1f}",
        f"{one.itl_ms.p99:.1f}",
        f"{1000 * one.cpu_s / one.tokens:.2f}" if one.tokens else "-",
        f"{one.cached_tokens / one.prompt_tokens:.0%}" if one.prompt_tokens else "-",
        f"{one.drafts.accepted}/{one.drafts.tokens}" if one.drafts.tokens else "-",
        f"{one.finished}/{total}",
        "-" if equal is None else f"{equal:.0%}",
    ]


def _remarks(records: Iterable[Record]) -> list[str]:
    """Return remarks on failures, which have no tokens in the table."""
    return [
        f"{one.point.name}, {one.point.load}, {one.engine}: {one.errors} errors, {one.first_errors[0]}"
        for one in records
        if one.errors
    ]
