"""Models in the local Hugging Face cache. They are found by looking at its folders, without network requests."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from protocol.checkpoint import audio_family, file_json
from protocol.model_files import weight_files

MAIN: Final = "main"
# Patterns of the files one of which holds the vocabulary of a tokenizer.
_VOCABULARY: Final = ("tokenizer.json", "vocab.*", "*.model", "*.tiktoken")


def cached_models(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the sorted ids of the repositories in the cache whose configuration, weights and tokenizer are there."""
    hub = cache_dir(environ)
    if not hub.is_dir():
        return []
    return sorted(repository_of(folder.name) for folder in hub.glob("models--*") if _is_model(folder))


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of the hub cache, as huggingface_hub determines it."""
    if hub := environ.get("HF_HUB_CACHE"):
        return Path(hub).expanduser()
    default = Path(environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return (Path(environ.get("HF_HOME") or default) / "hub").expanduser()


def split_revision(name: str) -> tuple[str, str]:
    """Split `ORG/NAME@REVISION`; the revision defaults to `main`."""
    repository, _, revision = name.partition("@")
    return repository, revision or MAIN


def folder_of(repository: str) -> Path:
    return cache_dir() / f"models--{repository.replace('/', '--')}"


def repository_of(folder: str) -> str:
    """Return the repository id for a cache folder's name. The hub allows no `--` in a name."""
    return folder.removeprefix("models--").replace("--", "/")


def is_cached(repository: str) -> bool:
    """Whether any part of a repository is in the cache."""
    return folder_of(repository).is_dir()


def repository_bytes(repository: str) -> int:
    """Return the bytes that a repository takes on the disk, including those of broken downloads."""
    return sum(_blobs(repository).values())


def remove(repository: str) -> int:
    """Delete a repository, including broken downloads, and return the freed bytes."""
    from huggingface_hub import DeleteCacheStrategy

    blobs, nothing = _blobs(repository), frozenset[Path]()
    # Deletion by commit hash would also delete another repository's revision with the same hash.
    DeleteCacheStrategy(
        expected_freed_size=sum(blobs.values()),
        blobs=nothing,
        refs=nothing,
        repos=frozenset({folder_of(repository)}),
        snapshots=nothing,
        cache_dir=cache_dir(),
    ).execute()
    # A blob that another repository shares still exists and is not counted.
    return sum(size for blob, size in blobs.items() if not blob.exists())


def _blobs(repository: str) -> dict[Path, int]:
    """Map the blob files of a repository to their sizes."""
    paths = (path.resolve() for path in folder_of(repository).glob("blobs/*"))
    return {path: path.stat().st_size for path in paths if path.is_file()}


def _is_model(folder: Path) -> bool:
    """Whether the snapshot of `main`, which loaders use, is a text model with all files that a load needs."""
    try:
        snapshot = folder / "snapshots" / (folder / "refs" / "main").read_text(encoding="utf-8").strip()
        config = file_json(snapshot / "config.json")
        if not isinstance(config, dict) or "model_type" not in config:
            return False
        weight_files(snapshot)
    except (OSError, ValueError):  # `UnusableWeights` is a `ValueError`
        return False
    # Models of audio may have their vocabulary in code.
    if not audio_family(config, repository_of(folder.name)) and not any(_files(snapshot, each) for each in _VOCABULARY):
        return False
    architectures = config.get("architectures") or ["ForCausalLM"]
    return any(str(name).endswith(("ForCausalLM", "ForConditionalGeneration")) for name in architectures)


def _files(snapshot: Path, pattern: str) -> set[str]:
    """Return the names of files that match a pattern. A link to a blob that is not in the cache is none."""
    return {file.name for file in snapshot.glob(pattern) if file.exists()}
