"""Fingerprint of the disk cache's files that a worker may use: equal weights, computed in the same way.

The KV of token ids depends on the weights, the configuration, the arithmetic and the form of the caches. The tokenizer
is part of the fingerprint, because ids have another meaning with another tokenizer. The chat template is not part of
it: the template only decides which ids a chat becomes.
"""

import logging
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from protocol.failures import Code
from protocol.model_files import PROCESSOR_FILES, TOKENIZER_FILES, digest, files_digest, weights_digest
from protocol.spec import WorkerSpec
from worker.errors import LoadFailed
from worker.kv.spans_and_checkpoints import KvLayout, kind_of_leaf, leaves
from worker.model.batch_mode import BatchMode
from worker.model.loader import LoadedModel
from worker.prefix_cache.disk import LABEL, CacheDisk, CacheFormat, FolderOwner
from worker.prefix_cache.file_format import FORMAT, is_known

__all__ = ["LABEL", "form_of", "model_form", "open_disk"]

log = logging.getLogger("mlxd.worker")


def open_disk(
    spec: WorkerSpec, form: Callable[[], CacheFormat], layout: KvLayout, wake: Callable[[], None]
) -> CacheDisk | None:
    """Open the disk cache of `spec`, if it is configured; `form` returns the form of the KV. Raises `LoadFailed`."""
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
    """Return the form of the KV of a loaded model in caches of this layout."""
    kinds = [kind_of_leaf(leaf) for leaf in leaves(layout.make())]
    return model_form(loaded, kinds, runs_code=spec.trust_remote_code)


def model_form(loaded: LoadedModel, kinds: list[str], *, runs_code: bool = False) -> CacheFormat:
    """Return digests of everything that KV depends on, equal on all hosts, without reading all of the weights."""
    # A model may compute padded rows wrongly, so KV from one batch mode must not be used in another.
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
