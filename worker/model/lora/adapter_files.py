"""Files of an adapter as written by mlx-lm or PEFT, read and checked against the model without computing.

Tensors within the bytes of a safetensors file (github.com/huggingface/safetensors), checked against its bounds.
"""

import hashlib
import json
import math
import os
import stat
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from worker.model.linears import LinearPlace, Linears, is_of_experts

# Bytes per element of the dtypes that an adapter may have.
WIDTHS: Final = {"F32": 4, "F16": 2, "BF16": 2}
_HEADER_BYTES_MAX: Final = 64 << 20
_LFS_POINTER: Final = b"version https://git-lfs"


class UnusableAdapter(Exception):
    """Raised with the operator's reason if an adapter cannot be served."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Tensor in a file: its elements are the bytes from `begin` to `end`."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(data: bytes) -> dict[str, StoredTensor]:
    """Return the tensors of a file by name. Each tensor is checked to lie within the file. Raises `UnusableAdapter`."""
    if data.startswith(_LFS_POINTER):
        raise UnusableAdapter("its file is a git-lfs pointer, not the weights; run: git lfs pull")
    length = struct.unpack_from("<Q", data)[0] if len(data) >= 8 else 0
    if not 2 <= length <= min(_HEADER_BYTES_MAX, len(data) - 8):
        raise UnusableAdapter("its file is truncated or not a safetensors file")
    try:
        header = json.loads(data[8 : 8 + length])
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        return {name: _tensor(name, entry, 8 + length, len(data)) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UnusableAdapter("its file has a broken safetensors header") from error


def _tensor(name: str, entry: dict[str, object], start: int, size: int) -> StoredTensor:
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in WIDTHS:
        raise UnusableAdapter(f"{name[:200]} has numbers of type {dtype!r}; {', '.join(WIDTHS)} are served")
    sizes, places = _numbers(shape), _numbers(offsets)
    begin, end = places
    if end - begin != WIDTHS[dtype] * math.prod(sizes) or start + end > size:
        raise ValueError(name)
    return StoredTensor(dtype, sizes, start + begin, start + end)


def _numbers(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(each) is int and each >= 0 for each in value):  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        raise ValueError
    return tuple(value)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


CONFIG: Final = "adapter_config.json"
MLX_FILE: Final = "adapters.safetensors"
PEFT_FILE: Final = "adapter_model.safetensors"
CONFIG_BYTES_MAX: Final = 1 << 20
FILE_BYTES_MAX: Final = 2 << 30
RANK_MAX: Final = 512
# Every tensor name in a PEFT file has this prefix.
_PEFT_BASE: Final = "base_model.model."
# Initializations that change the weights of the base model. Such an adapter is useless on the unchanged base.
_BASE_CHANGING_INITS: Final = ("pissa", "olora", "loftq", "corda")
# Maximum number of names that a refusal lists.
_MAX_LISTED_NAMES: Final = 3

Scale = Callable[[str, int], float]
"""The scale of an update by the name of its module and its rank."""


@dataclass(frozen=True, slots=True)
class Update:
    """Update of one layer: `x @ a @ b`, times `scale`. With a `magnitude`, the rows of the layer's weight get these
    norms (DoRA).

    `a` is `[inputs, rank]` and `b` `[rank, outputs]`, or the reverse if they are transposed.
    """

    place: LinearPlace
    rank: int
    scale: float
    a: StoredTensor
    b: StoredTensor
    magnitude: StoredTensor | None
    is_transposed: bool


@dataclass(frozen=True, slots=True)
class Files:
    """Checked files of an adapter. `data` is the content of the tensors' file; the digest covers all files."""

    path: str
    base: str
    updates: tuple[Update, ...]
    data: bytes
    digest: str

    @property
    def rank(self) -> int:
        return max(update.rank for update in self.updates)

    @property
    def is_dora(self) -> bool:
        return any(update.magnitude is not None for update in self.updates)


def read(folder: Path, linears: Linears) -> Files:
    """Read the adapter in a folder, and check that each tensor fits the model. Raises `UnusableAdapter`."""
    text = _bytes(folder / CONFIG, CONFIG_BYTES_MAX)
    config = _config(folder / CONFIG, text)
    is_peft = "peft_type" in config
    _check_kind(folder, config, is_peft=is_peft)
    data = _bytes(folder / (PEFT_FILE if is_peft else MLX_FILE), FILE_BYTES_MAX)
    tensors = read_header(data)
    updates = _peft_updates(config, tensors, linears) if is_peft else _mlx_updates(config, tensors, linears)
    if not updates:
        raise UnusableAdapter("its file holds no tensors of an adapter")
    base = config.get("base_model_name_or_path" if is_peft else "model")
    digest = hashlib.blake2b(data, digest_size=16, key=hashlib.blake2b(text, digest_size=32).digest()).hexdigest()
    return Files(str(folder), base if isinstance(base, str) else "", updates, data, digest)


def _bytes(file: Path, most: int) -> bytes:
    try:
        # O_NONBLOCK keeps a named pipe from blocking until it has a writer.
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
        with open(descriptor, "rb") as stream:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise UnusableAdapter(f"{file.name} is not a file")
            if status.st_size > most:
                raise UnusableAdapter(f"{file.name} has {status.st_size} bytes; at most {most} are read")
            return stream.read(most)
    except FileNotFoundError:
        raise UnusableAdapter(_missing(file)) from None
    except OSError as error:
        raise UnusableAdapter(f"{file.name} cannot be read: {error.strerror}") from None


def _missing(file: Path) -> str:
    if not file.parent.is_dir():
        return f"there is no folder {file.parent}"
    if file.name == CONFIG:
        return f"{file.parent} holds no {CONFIG}: it is no folder of an adapter"
    if (file.parent / "adapter_model.bin").exists():
        return "its weights are a pickle (adapter_model.bin), which can run code; save them as safetensors"
    return f"{file.parent} holds no {file.name}"


def _config(file: Path, text: bytes) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnusableAdapter(f"{file.name} is not readable JSON: {error}") from None
    if not isinstance(config, dict):
        raise UnusableAdapter(f"{file.name} is not a JSON object")
    return config


def _check_kind(folder: Path, config: Mapping[str, Any], *, is_peft: bool) -> None:
    """Refuse anything except a low-rank update that leaves the base unchanged. Raises `UnusableAdapter`."""
    if not is_peft:
        kind = config.get("fine_tune_type", "lora")
        if kind == "full":
            raise UnusableAdapter(
                "it is a full fine-tune, which replaces the model's weights: serve it as a model of its own"
            )
        if kind not in ("lora", "dora"):
            raise UnusableAdapter(f"fine_tune_type is {kind!r}; lora and dora are served")
        if not isinstance(config.get("lora_parameters"), dict):
            raise UnusableAdapter(f"{CONFIG} has no lora_parameters, nor a peft_type: neither mlx-lm nor PEFT wrote it")
        return
    if config["peft_type"] != "LORA":
        raise UnusableAdapter(f"its peft_type is {config['peft_type']!r}; LORA, with DoRA or without, is served")
    initial = str(config.get("init_lora_weights") or "").lower()
    if initial.startswith(_BASE_CHANGING_INITS):
        raise UnusableAdapter(
            f"it was begun with init_lora_weights = {initial!r}, which changes the base: convert it to LoRA"
        )
    for key in ("alora_invocation_tokens", "use_qalora", "use_bdlora", "lora_bias", "modules_to_save"):
        if config.get(key):
            raise UnusableAdapter(f"{key} is set, which is not served")
    if config.get("bias", "none") != "none":
        raise UnusableAdapter(f"it has biases of the base (bias = {config['bias']!r}), which are not served")


def _mlx_updates(
    config: Mapping[str, Any], tensors: Mapping[str, StoredTensor], linears: Linears
) -> tuple[Update, ...]:
    scale = _number(config["lora_parameters"], "scale")
    parts = _parts(tensors, {"lora_a": "a", "lora_b": "b", "m": "magnitude"}, "")
    return _updates(parts, linears, lambda _name, _rank: scale, is_transposed=False)


def _peft_updates(
    config: Mapping[str, Any], tensors: Mapping[str, StoredTensor], linears: Linears
) -> tuple[Update, ...]:
    leaves = {
        "lora_A.weight": "a",
        "lora_B.weight": "b",
        "lora_magnitude_vector": "magnitude",
        "lora_magnitude_vector.weight": "magnitude",
    }
    alpha, patterns = _number(config, "lora_alpha"), config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict) or any(set(key) & set("*+?[](){}^$|\\") for key in patterns):
        raise UnusableAdapter("alpha_pattern has regular expressions; names of modules are served")

    def scale(name: str, rank: int) -> float:
        own = next((_number(patterns, key) for key in patterns if f".{name}".endswith(f".{key}")), alpha)
        return own / (math.sqrt(rank) if config.get("use_rslora") else rank)

    return _updates(_parts(tensors, leaves, _PEFT_BASE), linears, scale, is_transposed=True)


def _parts(
    tensors: Mapping[str, StoredTensor], leaves: Mapping[str, str], begin: str
) -> dict[str, dict[str, StoredTensor]]:
    """Group tensors by module and part of the update. Raises `UnusableAdapter` for any other tensor."""
    parts: dict[str, dict[str, StoredTensor]] = {}
    others: list[str] = []
    for name, tensor in tensors.items():
        leaf = next((leaf for leaf in leaves if name.endswith(f".{leaf}")), None)
        if leaf is None or not name.startswith(begin):
            others.append(name)
            continue
        module = name[len(begin) : -len(leaf) - 1]
        parts.setdefault(module, {})[leaves[leaf]] = tensor
    if others:
        if any("lora_embedding" in name for name in others):
            raise UnusableAdapter("it changes the table of embeddings, which is not served")
        raise UnusableAdapter(f"tensors of its file are no part of a low-rank update: {_some(others)}")
    return parts


def _updates(
    parts: Mapping[str, Mapping[str, StoredTensor]], linears: Linears, scale: Scale, *, is_transposed: bool
) -> tuple[Update, ...]:
    if experts := [name for name in parts if is_of_experts(name)]:
        raise UnusableAdapter(f"it changes experts of a mixture, which is not served: {_some(experts)}")
    if tables := [name for name in parts if linears.is_table(name)]:
        raise UnusableAdapter(f"it changes the table of embeddings, which is not served: {_some(tables)}")
    places = {name: linears.find(name) for name in parts}
    if unknown := [name for name, place in places.items() if place is None]:
        raise UnusableAdapter(f"it was trained for another base: this model has no linear layer {_some(unknown)}")
    taken = [place.path for place in places.values() if place is not None]
    if len(set(taken)) < len(taken):
        raise UnusableAdapter("two updates of its file are for one layer")
    return tuple(
        _update(name, place, parts[name], scale, is_transposed=is_transposed)
        for name, place in places.items()
        if place is not None
    )


def _update(
    name: str, place: LinearPlace, part: Mapping[str, StoredTensor], scale: Scale, *, is_transposed: bool
) -> Update:
    if "a" not in part or "b" not in part:
        raise UnusableAdapter(f"the update of {name} lacks one of its two matrices")
    a, b, magnitude = part["a"], part["b"], part.get("magnitude")
    if len(a.shape) != 2:
        raise UnusableAdapter(f"{name}: a matrix has the shape {list(a.shape)}")
    rank = a.shape[0] if is_transposed else a.shape[1]
    if not 1 <= rank <= RANK_MAX:
        raise UnusableAdapter(f"{name}: its rank is {rank}; 1 to {RANK_MAX} are served")
    shapes = ((place.inputs, rank), (rank, place.outputs))
    wanted_a, wanted_b = (shape[::-1] for shape in shapes) if is_transposed else shapes
    if a.shape != wanted_a or b.shape != wanted_b or (magnitude is not None and magnitude.shape != (place.outputs,)):
        raise UnusableAdapter(
            f"it was trained for another base: {name} here goes from {place.inputs} to {place.outputs} numbers, "
            f"and its matrices are {list(a.shape)} and {list(b.shape)}"
        )
    return Update(place, rank, scale(name, rank), a, b, magnitude, is_transposed)


def _number(table: Mapping[str, Any], key: str) -> float:
    value = table.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UnusableAdapter(f"{CONFIG} gives {key} as {value!r}; it is a number")
    return float(value)


def _some(names: Iterable[str]) -> str:
    every = sorted(names)
    more = f" and {len(every) - _MAX_LISTED_NAMES} more" if len(every) > _MAX_LISTED_NAMES else ""
    return ", ".join(name[:200] for name in every[:_MAX_LISTED_NAMES]) + more
