"""Tables that were recorded: those that benchmarks/README.md shows as printed, and those of records in a file."""

import re
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.traffic import records

README: Final = Path(__file__).with_name("README.md")
RECORDS: Final = Path(__file__).with_name("records")


class Table(NamedTuple):
    """Cells of a printed table; `command` is the run that printed it, `subject` the machine, and the model if known."""

    command: str
    head: list[str]
    rows: list[list[str]]
    subject: str = "2-core Linux VM, CPU"


def table(name: str, text: str | None = None) -> Table:
    """Return the first table that `python -m benchmarks.NAME` has printed in the README. Columns are two spaces
    apart.
    """
    text = README.read_text(encoding="utf-8") if text is None else text
    block = re.search(rf"^```\n\$ (python -m benchmarks\.{name}\b[^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    if block is None:
        raise LookupError(f"{README.name} has no run of benchmarks.{name}")
    lines = [re.split(r"\s{2,}", line.strip()) for line in block[2].splitlines() if line.strip()]
    # The table's head is the line before the first row whose cells behind the first are numbers.
    first = next(at for at, cells in enumerate(lines) if at and len(cells) > 2 and _is_number(cells[-2]))
    rows: list[list[str]] = []
    for cells in lines[first:]:
        if cells[0].startswith("$"):
            break
        rows.append(cells)
    return Table(re.split(r"\s{2,}", block[1])[0], lines[first - 1], rows)


def recorded(name: str) -> Table:
    """Return the table of a picture: from its file of records (first model only) if there is one, otherwise from the
    README.
    """
    path = RECORDS / f"{name}.jsonl"
    if not path.exists():
        return table(name)
    measured = records.read(path)
    first = measured[0]
    own = [one for one in measured if (one.point.model, one.point.dtype) == (first.point.model, first.point.dtype)]
    subject = f"{first.point.model} {first.point.dtype}; {first.device}"
    return Table(first.command, list(records.HEADER), records.rows(own), subject)


def _is_number(cell: str) -> bool:
    return re.fullmatch(r"[\d.,/%]+", cell) is not None
