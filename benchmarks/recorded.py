"""Tables that benchmarks/README.md records, read from it: each is what a run printed."""

import re
from pathlib import Path
from typing import Final, NamedTuple

README: Final = Path(__file__).with_name("README.md")


class Table(NamedTuple):
    """Cells of a printed table; `command` is the run that printed it."""

    command: str
    head: list[str]
    rows: list[list[str]]


def table(name: str, text: str | None = None) -> Table:
    """The first table that `python -m benchmarks.NAME` has printed there. Its columns are two spaces apart."""
    text = README.read_text(encoding="utf-8") if text is None else text
    block = re.search(rf"^```\n\$ (python -m benchmarks\.{name}\b[^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    if block is None:
        raise LookupError(f"{README.name} has no run of benchmarks.{name}")
    lines = [re.split(r"\s{2,}", line.strip()) for line in block[2].splitlines() if line.strip()]
    # The head is the last line before the first with numbers only behind its first cells.
    first = next(at for at, cells in enumerate(lines) if at and len(cells) > 2 and _is_number(cells[-2]))
    rows: list[list[str]] = []
    for cells in lines[first:]:
        if cells[0].startswith("$"):
            break
        rows.append(cells)
    return Table(re.split(r"\s{2,}", block[1])[0], lines[first - 1], rows)


def _is_number(cell: str) -> bool:
    return re.fullmatch(r"[\d.,/%]+", cell) is not None
