"""Fingerprint of the files of the disk cache that a worker may use: same weights, computed in the same way.

The KV of some token ids follows from the weights, the configuration, the arithmetic and the form of the caches. The
tokenizer is in the key because ids mean something else with another one. The chat template is not: it decides which
ids a chat becomes, and where those are the same, so is their KV.
"""

import logging
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from protocol.failures import Code
from protocol.model_digest import PROCESSOR_FILES, TOKENIZER_FILES, digest, files_digest, weights_digest
from protocol.spec import WorkerSpec
from worker.errors import LoadFailed
from worker.kv.kv import KvLayout, kind_of_leaf, leaves
from worker.model.batch_mode import BatchMode
from worker.model.loader import LoadedModel
from worker.prefix_cache.disk import CacheDisk
from worker.prefix_cache.disk_folder import LABEL, CacheFormat, FolderOwner
from worker.prefix_cache.file_format import FORMAT, is_known

__all__ = ["LABEL", "form_of", "model_form", "open_disk"]

log = logging.getLogger("mlxd.worker")


def open_disk(
    spec: WorkerSpec, form: Callable[[], CacheFormat], layout: KvLayout, wake: Callable[[], None]
) -> CacheDisk | None:
    """The disk cache that `spec` asks for; None if it asks for none. `form` is that of the KV.

    Raises `LoadFailed` if it cannot be had.
    """
    if not spec.disk_cache_dir:
        return None
    if spec.disk_cache_bytes <= 0 or spec.cache_bytes == 0:
        raise LoadFailed(Code.BAD_CONFIG, "a disk cache needs a size, and a prefix cache in memory before it")
    caches = layout.make()
    unknown = sorted({type(leaf).__name__ for leaf in leaves(caches) if not is_known(leaf)})
    if unknown:
        log.warning("disk cache is off for this model: %s cannot be written to disk", ", ".join(unknown))
        return None
    claim = FolderOwner(spec.name, spec.disk_cache_dir, spec.path, form())
    return CacheDisk(Path(spec.disk_cache_dir), claim.form.key, spec.disk_cache_bytes, wake, claim=claim)


def form_of(spec: WorkerSpec, loaded: LoadedModel, layout: KvLayout) -> CacheFormat:
    """Form of the KV of a loaded model in caches of this layout."""
    kinds = [kind_of_leaf(leaf) for leaf in leaves(layout.make())]
    return model_form(loaded, kinds, runs_code=spec.trust_remote_code)


def model_form(loaded: LoadedModel, kinds: list[str], *, runs_code: bool = False) -> CacheFormat:
    """Everything that the KV of given token ids depends on, without reading all of the weights; equal on all hosts."""
    # What padding left on disk, where it is computed wrongly, is not to be read in another mode.
    mode = () if loaded.plan.mode is BatchMode.TOGETHER else (loaded.plan.mode.value,)
    dtypes = sorted({str(array.dtype) for array in _arrays(loaded.model)})
    code = sorted(file.name for file in loaded.path.glob("*.py")) if runs_code else []
    vision = (version("mlx-vlm"),) if loaded.vision is not None else ()
    processor = PROCESSOR_FILES if loaded.vision is not None else ()
    return CacheFormat(
        libraries=digest(version("mlx"), version("mlx-lm"), version("mlxd"), *vision),
        layout=digest(FORMAT, str(mx.default_device()), kinds, dtypes, *mode),
        weights=weights_digest(loaded.path),
        configuration=files_digest(loaded.path, ("config.json", *processor, *code)),
        tokenizer=files_digest(loaded.path, TOKENIZER_FILES),
    )


def _arrays(model: Any) -> list[mx.array]:
    flat: Any = tree_flatten(model.parameters())
    return [array for _, array in flat]
