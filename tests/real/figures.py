"""Measured figures of a run, from which docs/real-weights.md is written."""

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.real.packages import CACHE

FOLDER: Final = CACHE / "figures"


@dataclass(slots=True)
class Figures:
    """Figures of one test module: its subjects, in the order in which they were measured, with the results."""

    module: str
    rows: list[tuple[str, str]] = field(default_factory=list)

    def note(self, subject: str, result: str) -> None:
        self.rows.append((subject, result))

    def write(self, folder: Path = FOLDER) -> None:
        if self.rows:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{self.module}.json").write_text(json.dumps(self.rows))


def clear(folder: Path = FOLDER) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def read(folder: Path = FOLDER) -> dict[str, list[tuple[str, str]]]:
    """The figures of each module, by its name."""
    files = sorted(folder.glob("*.json"))
    return {file.stem: [(subject, result) for subject, result in json.loads(file.read_text())] for file in files}
