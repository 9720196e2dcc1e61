"""Pictures of the benchmarks: they show the recorded tables and nothing else."""

import html
import re
from pathlib import Path

import pytest

from benchmarks.plots import FOLDER, draw, pictures
from benchmarks.recorded import recorded, table

ROOT = Path(__file__).parents[2]
# Columns of each table that its picture shows.
SHOWN = {
    "compare": lambda row: [row[4]] if row[1] != "bare" else [],
    "stall": lambda row: [row[4]] if row[0] in ("mlxd, last", "mlx_lm.server") else [],
    "prefix": lambda row: [row[2], row[3], row[5], row[7]] if row[0] == "mlxd" else [],
    "stall_bodies": lambda row: [row[3]],
    "constrain": lambda row: [row[3]] if "constrained" in row[1] else [],
    "traffic": lambda row: [row[3]] if row[1].isdigit() else [],
}


def labels(path: Path) -> list[str]:
    return [html.unescape(text) for text in re.findall(r"<text[^>]*>([^<]+)</text>", path.read_text())]


@pytest.mark.parametrize("name", pictures())
def test_a_committed_picture_has_each_number_of_its_table_and_the_run_that_printed_it(name: str) -> None:
    run, texts = recorded(name), labels(FOLDER / f"{name}.svg")

    assert any(text.startswith(run.command) for text in texts), f"make plots: {name}"
    values = [value for row in run.rows for value in SHOWN[name.partition("-")[0]](row)]
    assert values
    missing = [value for value in values if not {f"{float(value):g}{unit}" for unit in ("", " ms", " s")} & set(texts)]
    assert missing == [], f"the table has changed since the picture was drawn: make plots ({name})"


def test_a_picture_is_drawn_from_the_table_as_it_is_committed(tmp_path: Path) -> None:
    fresh = draw("stall", tmp_path)

    assert labels(fresh) == labels(FOLDER / "stall.svg")


def test_a_table_is_read_as_it_was_printed() -> None:
    text = (
        "# x\n```\n$ python -m benchmarks.y --z 1\na line before\nname  a b  c\none, two  1  2.5\nthree  3  1/4\n```\n"
    )

    assert table("y", text) == (
        "python -m benchmarks.y --z 1", ["name", "a b", "c"], [["one, two", "1", "2.5"], ["three", "3", "1/4"]],
        "2-core Linux VM, CPU",
    )  # fmt: skip


def test_the_readmes_show_the_pictures() -> None:
    own = (ROOT / "benchmarks" / "README.md").read_text()

    assert all(f"](plots/{name}.svg)" in own for name in pictures())
    assert (ROOT / "README.md").read_text().count("](benchmarks/plots/") == 3
