"""Data files of the corpus: `word_lists/*.txt`, one item per line, and `tables/*.toml` with phrasings and facts.

The generator draws from a list by position, so the list's order and its repeated items affect every sample.
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
    """Return the texts under one key; a skill fills in their `{slots}`."""
    return tuple(table(name)[key])
