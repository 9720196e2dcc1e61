"""Experts of a mixture-of-experts model that are read from disk.

Records of experts: conversion between the arrays of one expert and bytes.

Cache of experts: memory has as many experts of each layer as fit; the others are read from disk when they are
chosen.

A layer keeps mlx-lm's modules. Their weights have one row per slot of the cache instead of one per expert, and the
router's choice is translated to slots. So the arithmetic of a token is the same as with all experts in memory.

Bound of a forward pass of a model with experts, which gather a row for each token and chosen expert.
"""

import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear, SwitchMLP
from numpy.typing import NDArray

from protocol.model_files import FOLDER, ExpertIndex, ExpertLayer, ExpertTensor
from protocol.stats import Stats

# NumPy has no bfloat16, so the bytes of bfloat16 arrays are handled as integers of the same width.
_DTYPES: Final[dict[str, tuple[Any, Any]]] = {
    "float32": (np.float32, mx.float32),
    "float16": (np.float16, mx.float16),
    "bfloat16": (np.uint16, mx.bfloat16),
    "uint32": (np.uint32, mx.uint32),
    "uint8": (np.uint8, mx.uint8),
}
# Number of threads that read experts from the disk.
READ_THREADS: Final = 4


def name_of(dtype: mx.Dtype) -> str | None:
    """Return the index's name of a dtype; None if the index has no name for it."""
    return next((name for name, (_, own) in _DTYPES.items() if own == dtype), None)


def to_bytes(array: mx.array) -> bytes:
    """Return an array's elements as bytes, little-endian, in row order."""
    kept, _ = _DTYPES[str(name_of(array.dtype))]
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array).astype(kept, copy=False).tobytes()


class Records:
    """File of one layer, which stays open until the process ends. Several threads may read it."""

    def __init__(self, folder: Path, layer: ExpertLayer, readers: ThreadPoolExecutor) -> None:
        self._file = os.open(folder / layer.file, os.O_RDONLY)
        self._layer = layer
        self._readers = readers

    def read(self, experts: Sequence[int]) -> list[list[mx.array]]:
        """Read the arrays of each expert, in the order of the layer's tensors. Raises `OSError`."""
        tensors = self._layer.tensors
        return [[_array(record, tensor) for tensor in tensors] for record in self._readers.map(self._record, experts)]

    def _record(self, expert: int) -> bytearray:
        size = self._layer.record_bytes
        record = bytearray(size)
        view, done = memoryview(record), 0
        while done < size:
            count = os.preadv(self._file, [view[done:]], expert * size + done)
            if count == 0:
                raise OSError(f"{self._layer.file} ended in expert {expert}")
            done += count
        return record


def _array(record: bytearray, tensor: ExpertTensor) -> mx.array:
    kept, own = _DTYPES[tensor.dtype]
    flat = np.frombuffer(record, kept, count=tensor.bytes // np.dtype(kept).itemsize, offset=tensor.offset)
    array = mx.array(flat.reshape(tensor.shape))
    return array.view(own) if own == mx.bfloat16 else array


# Layers of mlx-lm that contain experts: they are called with tokens `[…, dim]` and experts `[…, chosen]`.
SWITCHES: Final = (SwitchGLU, SwitchMLP)
PROJECTIONS: Final = (SwitchLinear, QuantizedSwitchLinear)


class DiskExperts(nn.Module):
    """Experts of a layer, of which those in memory have slots. Only the engine thread writes `counts`."""

    def __init__(self, switch: Any, layer: ExpertLayer, slots: int, records: Records, counts: Stats) -> None:
        super().__init__()
        self.switch = switch
        self._layer = layer
        self._records = records
        self._counts = counts
        self._slot_of = np.full(layer.experts, -1, dtype=np.int32)
        # Experts in memory and their slots, least recently used first.
        self._used = OrderedDict[int, int]()
        self._free = list(range(slots))
        self._slots = slots

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        chosen: NDArray[Any] = np.array(indices)
        needed: list[int] = np.unique(chosen).tolist()
        if len(needed) <= self._slots:
            self._bring(needed)
            result: mx.array = self.switch(x, mx.array(self._slot_of[chosen]))
            return result
        return self._in_turns(x, chosen, needed)

    def _in_turns(self, x: mx.array, chosen: NDArray[Any], needed: list[int]) -> mx.array:
        """Compute more experts than there are slots in several turns, each for the tokens that chose its experts."""
        flat, pairs, count = x.reshape(-1, x.shape[-1]), chosen.reshape(-1), chosen.shape[-1]
        # Experts in memory are computed first, so that no earlier turn evicts them.
        needed = sorted(needed, key=lambda expert: self._slot_of[expert] < 0)
        order: list[NDArray[Any]] = []
        outputs: list[mx.array] = []
        for begin in range(0, len(needed), self._slots):
            turn = needed[begin : begin + self._slots]
            places = np.flatnonzero(np.isin(pairs, turn))
            self._bring(turn)
            own = mx.array(self._slot_of[pairs[places]])[:, None]
            outputs.append(self.switch(flat[mx.array(places // count)], own)[:, 0])
            order.append(places)
            mx.eval(outputs[-1])  # the next turn may overwrite these experts
        back = mx.array(np.argsort(np.concatenate(order)))
        return mx.concatenate(outputs)[back].reshape(*chosen.shape, -1)

    def _bring(self, needed: list[int]) -> None:
        """Load experts into memory, at most as many as there are slots."""
        missing = [expert for expert in needed if self._slot_of[expert] < 0]
        for expert in needed:
            if expert in self._used:
                self._used.move_to_end(expert)
        self._counts.expert_hits += len(needed) - len(missing)
        if not missing:
            return
        self._counts.expert_misses += len(missing)
        self._counts.expert_read_bytes += len(missing) * self._layer.record_bytes
        held = [getattr(self.switch, tensor.projection) for tensor in self._layer.tensors]
        for expert, arrays in zip(missing, self._records.read(missing), strict=True):
            slot = self._slot(expert)
            for projection, tensor, array in zip(held, self._layer.tensors, arrays, strict=True):
                own = projection[tensor.name]
                own[slot] = array.astype(own.dtype)
        mx.eval([projection[tensor.name] for projection, tensor in zip(held, self._layer.tensors, strict=True)])

    def _slot(self, expert: int) -> int:
        """Return a slot for an expert; evicts the least recently used expert, which this turn never needs."""
        if self._free:
            slot = self._free.pop()
        else:
            dropped, slot = self._used.popitem(last=False)
            self._slot_of[dropped] = -1
            self._counts.expert_evictions += 1
        self._used[expert], self._slot_of[expert] = slot, slot
        return slot


def attach(model: Any, folder: Path, index: ExpertIndex, cache_bytes: int) -> Stats:
    """Attach the experts of a repacked folder to a model that was loaded without them. Raises `ValueError` and
    `OSError`."""
    switches = dict(switches_of(model))
    if switches.keys() != {layer.path for layer in index.layers}:
        raise ValueError(f"the experts of {folder} are not those of its config.json")
    counts, readers = Stats(), ThreadPoolExecutor(READ_THREADS, "experts")
    for layer in index.layers:
        slots = index.slots(layer, cache_bytes)
        counts.expert_cache_bytes += slots * layer.record_bytes
        switch = switches[layer.path]
        _check(folder, switch, layer)
        _give_slots(switch, layer, slots)
        records = Records(folder / FOLDER, layer, readers)
        put(model, layer.path, DiskExperts(switch, layer, slots, records, counts))
    return counts


def switches_of(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the layers that contain experts, with their paths. Raises `ValueError` for experts outside such layers."""
    inside: set[int] = set()
    modules = list[tuple[str, Any]](model.named_modules())
    for path, module in modules:
        if isinstance(module, SWITCHES):
            inside.update(id(child) for child in module.children().values())
            yield path, module
    stray = next(
        (path for path, module in modules if isinstance(module, PROJECTIONS) and id(module) not in inside), None
    )
    if stray is not None:
        raise ValueError(f"the experts of {stray} are in no layer that can leave them on disk")


def put(model: Any, path: str, module: nn.Module) -> None:
    """Set the module at a path of a model."""
    model.update_modules(tree_unflatten([(path, module)]))


def _check(folder: Path, switch: Any, layer: ExpertLayer) -> None:
    """Raise `ValueError` if the index belongs to another model, because the router would then choose experts that do
    not exist."""
    counts = {
        name: int(each.weight.shape[0]) for name, each in switch.children().items() if isinstance(each, PROJECTIONS)
    }
    if counts != {tensor.projection: layer.experts for tensor in layer.tensors}:
        raise ValueError(f"the experts of {layer.path} in {folder} are not those of its config.json")


def _give_slots(switch: Any, layer: ExpertLayer, slots: int) -> None:
    """Replace the layer's projections by modules whose weights have one row per slot."""
    for name in dict.fromkeys(tensor.projection for tensor in layer.tensors):
        form = layer.quantization.get(name)
        projection = SwitchLinear(1, 1, 1, bias=False)
        if form is not None:
            size, bits, mode = form
            projection = SwitchLinear(size, 1, 1, bias=False).to_quantized(size, bits, mode)
        setattr(switch, name, projection)
    for tensor in layer.tensors:
        dtype: Any = getattr(mx, tensor.dtype)
        setattr(getattr(switch, tensor.projection), tensor.name, mx.zeros((slots, *tensor.shape), dtype))


# Beyond this number of rows, MLX up to 0.32.2 computed wrong results on an M5 (mlx#3856, fixed by mlx#3922).
MAX_GATHERED_ROWS: Final = 32_768
# Keys of config.json that hold the number of experts per token.
_CHOSEN: Final = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_top_k",
    "moe_k",
    "top_k_experts",
    "num_selected_experts",
)


def experts_per_token(model: Any, config: Mapping[str, Any]) -> int:
    """Return the number of experts of a layer that a token uses; 0 for a model without experts."""
    counts = [int(module.weight.shape[0]) for _, module in model.named_modules() if isinstance(module, PROJECTIONS)]
    return chosen_of(config, min(counts)) if counts else 0


def chosen_of(config: Mapping[str, Any], experts: int) -> int:
    """Return the number of experts per token; if the configuration has none, a quarter of a layer's experts."""
    parts = [config, config.get("text_config"), config.get("ffn_config")]
    values = [part.get(key) for part in parts if isinstance(part, Mapping) for key in _CHOSEN]
    each = [count for value in values for count in (value if isinstance(value, list) else [value])]
    return max((count for count in each if isinstance(count, int) and count > 0), default=max(1, experts // 4))


def pass_tokens(experts: int) -> int:
    """Return the maximum number of tokens of a forward pass, by the experts per token; 0 means no limit."""
    return max(1, MAX_GATHERED_ROWS // experts) if experts else 0
