"""Data files of the corpus: `word_lists/*.txt`, one item a line, and `tables/*.toml` with phrasings and facts.

A list is drawn from by position, so its order and its repeated items are part of the data.
"""

import tomllib
from functools import cache
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).parent


def word_list(name: str) -> list[str]:
    return (FOLDER / "word_lists" / f"{name}.txt").read_text("utf-8").splitlines()


@cache
def table(name: str) -> dict[str, Any]:
    return tomllib.loads((FOLDER / "tables" / f"{name}.toml").read_text("utf-8"))


@cache
def phrasings(name: str, key: str) -> tuple[str, ...]:
    """The texts of one key; `{slots}` in them are filled in by the skill."""
    return tuple(table(name)[key])
