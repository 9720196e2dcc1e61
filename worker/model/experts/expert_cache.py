"""Cache of experts: memory has as many experts of each layer as fit; the others are read from disk when they are
chosen.

A layer keeps mlx-lm's modules. Their weights have one row per slot of the cache instead of one per expert, and the
router's choice is translated to slots. So the arithmetic of a token is the same as with all experts in memory.
"""

from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear, SwitchMLP
from numpy.typing import NDArray

from protocol.experts import FOLDER, ExpertIndex, ExpertLayer
from protocol.stats import Stats
from worker.model.experts.records import READ_THREADS, Records

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
