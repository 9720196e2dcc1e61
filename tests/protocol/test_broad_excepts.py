"""What catches everything is a boundary: of a task, a thread, a process, a callback, one row or code of others."""

import re
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
BROAD: Final = re.compile(r"^\s*except (?:Exception|BaseException)\b(?P<rest>.*)$")
# It only gets smaller.
MOST: Final = 58


def broad() -> list[str]:
    files = [file for name in ("gateway", "worker", "protocol", "deploy") for file in (ROOT / name).rglob("*.py")]
    return [
        f"{file.relative_to(ROOT)}:{at}{found['rest']}"
        for file in sorted(files)
        for at, line in enumerate(file.read_text().splitlines(), 1)
        if (found := BROAD.match(line)) is not None
    ]


def test_each_broad_except_says_at_which_boundary_it_stands() -> None:
    assert [each for each in broad() if "#" not in each] == []


def test_there_are_no_more_broad_excepts_than_boundaries() -> None:
    assert len(broad()) <= MOST
