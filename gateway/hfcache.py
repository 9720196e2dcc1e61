"""Which models the local Hugging Face cache holds, from its folders alone: nothing is imported, nothing is fetched."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path


def cached_models(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Repository ids, sorted, of text models whose config and safetensors weights are all here."""
    hub = cache_dir(environ)
    if not hub.is_dir():
        return []
    return sorted(
        folder.name.removeprefix("models--").replace("--", "/")
        for folder in hub.glob("models--*")
        if any(_is_model(snapshot) for snapshot in _snapshots(folder))
    )


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """The hub cache, found as huggingface_hub finds it."""
    if hub := environ.get("HF_HUB_CACHE"):
        return Path(hub).expanduser()
    default = Path(environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return (Path(environ.get("HF_HOME") or default) / "hub").expanduser()


def _snapshots(folder: Path) -> Iterator[Path]:
    """The snapshot of `main`: the one that a loader would take."""
    try:
        revision = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return
    yield folder / "snapshots" / revision


def _is_model(snapshot: Path) -> bool:
    if next(snapshot.glob("*.safetensors"), None) is None:
        return False
    try:
        config = json.loads((snapshot / "config.json").read_bytes())
    except (OSError, ValueError):
        return False
    if not isinstance(config, dict) or "model_type" not in config:
        return False
    architectures = config.get("architectures") or ["ForCausalLM"]
    return any(str(name).endswith(("ForCausalLM", "ForConditionalGeneration")) for name in architectures)
