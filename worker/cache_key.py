"""Which files of the disk cache a worker may use: those of the same weights, computed in the same way.

The KV of some token ids follows from the weights, the configuration, the arithmetic and the form of the caches. The
tokenizer is in the key because ids mean something else with another one. The chat template is not: it decides which
ids a chat becomes, and where those are the same, so is their KV.
"""

import hashlib
import logging
import struct
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from mlx.utils import tree_flatten

from protocol.failures import Code
from protocol.spec import WorkerSpec
from worker.cache_disk import CacheDisk
from worker.cache_file import FORMAT, is_known
from worker.cache_folder import LABEL, Claim, Form
from worker.errors import LoadFailed
from worker.kv import Layout, leaves
from worker.loader import Loaded

__all__ = ["LABEL", "model_form", "open_disk"]

log = logging.getLogger("mlxd.worker")

_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "merges.txt")


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
    form = model_form(loaded, kinds)
    claim = Claim(spec.name, spec.disk_cache_dir, spec.path, form)
    return CacheDisk(Path(spec.disk_cache_dir), form.key, spec.disk_cache_bytes, wake, claim=claim)


def model_form(loaded: Loaded, kinds: list[str]) -> Form:
    """Everything that the KV of given token ids depends on, without reading the weights."""
    dtypes = sorted({str(array.dtype) for array in _arrays(loaded.model)})
    weights = [(file, file.stat()) for file in sorted(loaded.path.glob("*.safetensors"))]
    return Form(
        libraries=_digest(version("mlx"), version("mlx-lm"), version("mlxd")),
        layout=_digest(FORMAT, str(mx.default_device()), kinds, dtypes),
        weights=_digest(*((file.name, facts.st_size, facts.st_mtime_ns, _header(file)) for file, facts in weights)),
        configuration=_digest_files(loaded.path, ("config.json",)),
        tokenizer=_digest_files(loaded.path, _TOKENIZER_FILES),
    )


def _digest(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=20).hexdigest()


def _digest_files(folder: Path, names: Iterable[str]) -> str:
    files = [(name, folder / name) for name in names]
    return _digest(*((name, _digest(file.read_bytes()) if file.exists() else None) for name, file in files))


def _arrays(model: Any) -> list[mx.array]:
    flat: Any = tree_flatten(model.parameters())
    return [array for _, array in flat]


def _header(file: Path) -> str:
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        return hashlib.blake2b(stream.read(length)).hexdigest()
