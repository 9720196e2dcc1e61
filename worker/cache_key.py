"""Which files of the disk cache a worker may use: those of the same weights, computed in the same way.

The KV of some token ids follows from the weights, the configuration, the arithmetic and the form of the caches. The
tokenizer is in the key because ids mean something else with another one. The chat template is not: it decides which
ids a chat becomes, and where those are the same, so is their KV.
"""

import hashlib
import logging
import struct
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from mlx.utils import tree_flatten

from protocol.failures import Code
from protocol.spec import WorkerSpec
from worker.cache_disk import CacheDisk
from worker.cache_file import FORMAT, is_known
from worker.errors import LoadFailed
from worker.kv import Layout, leaves
from worker.loader import Loaded

log = logging.getLogger("mlxd.worker")

_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "merges.txt")
LABEL: Final = ".model"


def open_disk(spec: WorkerSpec, loaded: Loaded, layout: Layout, wake: Callable[[], None]) -> CacheDisk | None:
    """The disk cache that `spec` asks for; None if it asks for none. Raises `LoadFailed` if it cannot be had."""
    if not spec.disk_cache_dir:
        return None
    if spec.disk_cache_bytes <= 0 or spec.cache_bytes == 0:
        raise LoadFailed(Code.BAD_CONFIG, "a disk cache needs a size, and a prefix cache in memory before it")
    caches = layout.make()
    unknown = sorted({type(leaf).__name__ for leaf in leaves(caches) if not is_known(leaf)})
    if unknown:
        log.warning("the disk cache is off for this model: %s has no form on disk", ", ".join(unknown))
        return None
    kinds = [type(leaf).__name__ for leaf in leaves(caches)]
    root, key = Path(spec.disk_cache_dir), model_key(loaded, kinds)
    _label(root / key, spec.path)
    return CacheDisk(root, key, spec.disk_cache_bytes, wake)


def _label(folder: Path, path: str) -> None:
    """Note whose folder it is, for people who look at it or want it emptied; nothing else depends on it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / LABEL).touch(mode=0o600)
        (folder / LABEL).write_text(f"{path}\n", encoding="utf-8")
    except OSError as error:
        log.warning("the disk cache's folder cannot be labelled: %s", error)


def model_key(loaded: Loaded, kinds: list[str]) -> str:
    """A digest of everything that the KV of given token ids depends on, without reading the weights."""
    digest = hashlib.blake2b(digest_size=20)

    def add(*parts: object) -> None:
        digest.update(repr(parts).encode() + b"\n")

    add(FORMAT, version("mlx"), version("mlx-lm"), version("mlxd"), str(mx.default_device()))
    add(kinds, sorted({str(array.dtype) for array in _arrays(loaded.model)}))
    for file in sorted(loaded.path.glob("*.safetensors")):
        facts = file.stat()
        add(file.name, facts.st_size, facts.st_mtime_ns, _header(file))
    for name in ("config.json", *_TOKENIZER_FILES):
        file = loaded.path / name
        add(name, hashlib.blake2b(file.read_bytes()).hexdigest() if file.exists() else None)
    return digest.hexdigest()


def _arrays(model: Any) -> list[mx.array]:
    flat: Any = tree_flatten(model.parameters())
    return [array for _, array in flat]


def _header(file: Path) -> str:
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        return hashlib.blake2b(stream.read(length)).hexdigest()
