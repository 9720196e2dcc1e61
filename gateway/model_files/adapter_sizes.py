"""Sizes of adapters' files, known before their model is loaded."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from gateway.model_files.metadata import Unreadable, find

_FILES: Final = ("adapters.safetensors", "adapter_model.safetensors")


def adapter_sizes(paths: Mapping[str, str]) -> dict[str, int]:
    """Return the bytes of each adapter's file by name; 0 for a missing file."""
    return {name: _size(path) for name, path in paths.items()}


def _size(path: str) -> int:
    with suppress(Unreadable, OSError, ValueError):
        folder = find(path)
        return next((file.stat().st_size for name in _FILES if (file := folder / name).is_file()), 0)
    return 0
