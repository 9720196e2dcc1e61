"""Models in the local Hugging Face cache, from its folders alone: nothing is fetched."""

import json
import os
from collections.abc import Mapping
from pathlib import Path


def cached_models(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Repository ids, sorted, of text models whose config and safetensors weights are all here."""
    hub = cache_dir(environ)
    if not hub.is_dir():
        return []
    return sorted(repository_of(folder.name) for folder in hub.glob("models--*") if _is_model(folder))


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """The hub cache, found as huggingface_hub finds it."""
    if hub := environ.get("HF_HUB_CACHE"):
        return Path(hub).expanduser()
    default = Path(environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return (Path(environ.get("HF_HOME") or default) / "hub").expanduser()


def folder_of(repository: str) -> Path:
    return cache_dir() / f"models--{repository.replace('/', '--')}"


def repository_of(folder: str) -> str:
    """The other way round, of the folder's name. The hub allows no `--` in a name."""
    return folder.removeprefix("models--").replace("--", "/")


def is_cached(repository: str) -> bool:
    """Whether anything of a repository is here, be it a part."""
    return folder_of(repository).is_dir()


def repository_bytes(repository: str) -> int:
    """Bytes of a repository on the disk, with remains of broken downloads."""
    return sum(_blobs(repository).values())


def remove(repository: str) -> int:
    """Delete all of a repository, broken downloads too. Returns the bytes that are free again."""
    # Slow to import, and needed here only.
    from huggingface_hub import DeleteCacheStrategy

    blobs, nothing = _blobs(repository), frozenset[Path]()
    # Not by its commits: of two repositories that share one, both would go.
    DeleteCacheStrategy(
        expected_freed_size=sum(blobs.values()),
        blobs=nothing,
        refs=nothing,
        repos=frozenset({folder_of(repository)}),
        snapshots=nothing,
        cache_dir=cache_dir(),
    ).execute()
    # What another repository shares is still there.
    return sum(size for blob, size in blobs.items() if not blob.exists())


def _blobs(repository: str) -> dict[Path, int]:
    """Blob files of a repository, and their sizes."""
    paths = (path.resolve() for path in folder_of(repository).glob("blobs/*"))
    return {path: path.stat().st_size for path in paths if path.is_file()}


def _is_model(folder: Path) -> bool:
    """Whether the snapshot of `main`, which a loader would take, is a text model."""
    try:
        snapshot = folder / "snapshots" / (folder / "refs" / "main").read_text(encoding="utf-8").strip()
        config = json.loads((snapshot / "config.json").read_bytes())
    except (OSError, ValueError):
        return False
    if next(snapshot.glob("*.safetensors"), None) is None:
        return False
    if not isinstance(config, dict) or "model_type" not in config:
        return False
    architectures = config.get("architectures") or ["ForCausalLM"]
    return any(str(name).endswith(("ForCausalLM", "ForConditionalGeneration")) for name in architectures)
