"""Fingerprint of the files of the disk cache that a worker may use: same weights, computed in the same way.

The KV of some token ids follows from the weights, the configuration, the arithmetic and the form of the caches. The
tokenizer is in the key because ids mean something else with another one. The chat template is not: it decides which
ids a chat becomes, and where those are the same, so is their KV.
"""

import hashlib
import logging
import os
import re
import struct
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import msgspec
from mlx.utils import tree_flatten

from protocol.failures import Code
from protocol.spec import WorkerSpec
from worker.cache.directory import LABEL, Claim, Form
from worker.cache.disk import CacheDisk
from worker.cache.file_format import FORMAT, is_known
from worker.cache.kv import Layout, leaves
from worker.errors import LoadFailed
from worker.model.lanes import Lane
from worker.model.loader import Loaded

__all__ = ["LABEL", "model_form", "open_disk"]

log = logging.getLogger("mlxd.worker")

# A file in the Hugging Face cache is a link to a blob that is named by its SHA-256.
_BLOB: Final = re.compile(r"[0-9a-f]{64}")
# Of other files so much is read: blocks spread over each, and one in the middle of each tensor.
_BLOCKS: Final = 64
_BLOCK_BYTES: Final = 64 << 10
_TENSOR_BYTES: Final = 4 << 10
# What becomes of the pixels of media, beside the tower's weights.
_PROCESSOR_FILES: Final = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
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
        log.warning("disk cache is off for this model: %s cannot be written to disk", ", ".join(unknown))
        return None
    kinds = [type(leaf).__name__ for leaf in leaves(caches)]
    form = model_form(loaded, kinds, runs_code=spec.trust_remote_code)
    claim = Claim(spec.name, spec.disk_cache_dir, spec.path, form)
    return CacheDisk(Path(spec.disk_cache_dir), form.key, spec.disk_cache_bytes, wake, claim=claim)


def model_form(loaded: Loaded, kinds: list[str], *, runs_code: bool = False) -> Form:
    """Everything that the KV of given token ids depends on, without reading all of the weights; equal on all hosts."""
    # What padding left on disk, where it is computed wrongly, is not to be read in another lane.
    lane = () if loaded.plan.lane is Lane.TOGETHER else (loaded.plan.lane.value,)
    dtypes = sorted({str(array.dtype) for array in _arrays(loaded.model)})
    code = sorted(file.name for file in loaded.path.glob("*.py")) if runs_code else []
    vision = (version("mlx-vlm"),) if loaded.vision is not None else ()
    processor = _PROCESSOR_FILES if loaded.vision is not None else ()
    return Form(
        libraries=_digest(version("mlx"), version("mlx-lm"), version("mlxd"), *vision),
        layout=_digest(FORMAT, str(mx.default_device()), kinds, dtypes, *lane),
        weights=_digest(*((file.name, _content(file)) for file in sorted(loaded.path.glob("model*.safetensors")))),
        configuration=_digest_files(loaded.path, ("config.json", *processor, *code)),
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


class _Tensor(msgspec.Struct, frozen=True):
    data_offsets: tuple[int, int]


def _content(file: Path) -> str:
    """The SHA-256 of a blob, from its name; else a digest of size, header and samples. Two models of one architecture
    have all but the samples in common, and what training changes of a tensor it changes everywhere in it."""
    blob = file.resolve()
    if blob.parent.name == "blobs" and _BLOB.fullmatch(blob.name):
        return blob.name
    with file.open("rb", buffering=0) as stream:
        descriptor = stream.fileno()
        size = os.fstat(descriptor).st_size
        (length,) = struct.unpack("<Q", os.pread(descriptor, 8, 0))
        header = os.pread(descriptor, length, 8)
        digest = hashlib.blake2b(b"%d " % size + header, digest_size=32)
        begin = 8 + length
        for at in range(_BLOCKS):
            digest.update(os.pread(descriptor, _BLOCK_BYTES, begin + (size - begin) * at // _BLOCKS))
        for tensor in _tensors(header):
            middle = begin + sum(tensor.data_offsets) // 2
            digest.update(os.pread(descriptor, _TENSOR_BYTES, middle))
    return digest.hexdigest()


def _tensors(header: bytes) -> list[_Tensor]:
    table = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
    return [msgspec.json.decode(raw, type=_Tensor) for name, raw in table.items() if name != "__metadata__"]
