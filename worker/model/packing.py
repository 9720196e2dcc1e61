"""Packing: parts of a forward pass with separate caches share one pass through the model's weights.

In a pass, decoding rows have one or a few tokens and rows in prefill have a chunk, so most of a common rectangle would
be padding. So the tokens of all parts run as one row `[1, tokens]` through the modules that treat each token
separately, which have most of the weights. Modules that mix tokens (attention, recurrent layers) run part by part, on
the part's caches. These modules are wrapped once, when the model is loaded; in other passes the wrappers behave exactly
like the modules.
"""

import inspect
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn

from worker.vision.multimodal_merge import WrappedModule, text_core

# Arguments that a mixing module takes besides its input.
_ARGUMENTS: Final = {"mask", "cache"}
# Names that mlx-lm's models give to the norm before the head.
_NORMS: Final = ("norm", "norm_f", "ln_f", "final_layernorm", "final_layer_norm", "final_norm", "embedding_norm")

Shape = tuple[int, int]
"""Rows of a part, and tokens of each."""


@dataclass(slots=True, eq=False)
class PackedRows:
    """Caches of one layer, one for each part of a packed pass."""

    caches: Sequence[Any]
    shapes: Sequence[Shape]

    def __getitem__(self, at: int) -> "PackedRows":
        return PackedRows([cache[at] for cache in self.caches], self.shapes)

    def make_mask(self, _count: int, *args: Any, **kwargs: Any) -> "_Masks":
        pairs = zip(self.caches, self.shapes, strict=True)
        return _Masks([cache.make_mask(width, *args, **kwargs) for cache, (_, width) in pairs])


@dataclass(slots=True, eq=False)
class _Masks:
    """Masks of one layer, one for each part of a packed pass."""

    of: Sequence[Any]


@dataclass(slots=True)
class PackingTurn:
    """Index of the part that a mixing module currently computes, for the modules inside it; None outside such a
    module."""

    at: int | None = None


class Mixing(WrappedModule):
    """Wrapper of a module that mixes tokens: it computes one part after another."""

    def __init__(self, module: Any, turn: PackingTurn) -> None:
        super().__init__(module)
        self._turn = turn
        # Function that computes one part by the wrapped module. Attention kernels replace it.
        self.call: Callable[..., Any] = type(module).__call__

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> Any:
        packed = kwargs.get("cache", args[-1] if args else None)
        if not isinstance(packed, PackedRows):
            return self.call(self.module, x, *args, **kwargs)
        mixed: list[mx.array] = []
        try:
            for at, (part, (rows, width)) in enumerate(zip(split(x, packed.shapes), packed.shapes, strict=True)):
                self._turn.at = at
                own = [_own(value, at) for value in args]
                named = {name: _own(value, at) for name, value in kwargs.items()}
                mixed.append(self.call(self.module, part, *own, **named).reshape(1, rows * width, -1))
        finally:
            self._turn.at = None
        return mx.concatenate(mixed, axis=1)


class LastNorm(WrappedModule):
    """Wrapper of the norm before the head; if `wanted` is set, the head only gets those tokens."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.wanted: tuple[Sequence[Shape], int] | None = None

    def __call__(self, x: mx.array) -> mx.array:
        if self.wanted is not None:
            shapes, count = self.wanted
            x = split(x, shapes)[0][:, :count]
        return self.module(x)


class Packing:
    """Packed passes of one model. Owned by the engine thread."""

    def __init__(self, norm: LastNorm, turn: PackingTurn) -> None:
        self._norm = norm
        self.turn = turn

    @contextmanager
    def first(self, shapes: Sequence[Shape], count: int) -> Generator[None]:
        """Restrict the head during a pass to the first `count` tokens of each row of the first part."""
        self._norm.wanted = shapes, count
        try:
            yield
        finally:
            self._norm.wanted = None


def split(x: mx.array, shapes: Sequence[Shape]) -> list[mx.array]:
    """Split `[1, tokens, …]` into the tokens of each part, `[rows, width, …]`; a single part is returned unchanged."""
    if len(shapes) == 1:
        return [x]
    parts: list[mx.array] = []
    begin = 0
    for rows, width in shapes:
        end = begin + rows * width
        parts.append(x[:, begin:end].reshape(rows, width, *x.shape[2:]))
        begin = end
    return parts


def prepare(model: Any) -> None:
    """Wrap the modules of a model for packed passes if the modules have the usual forms; `packing_of` returns the
    result."""
    try:
        core = text_core(model)
    except ValueError:
        return
    name = next((name for name in _NORMS if isinstance(core.get(name), nn.Module)), None)
    if name is None or isinstance(core[name], LastNorm) or not isinstance(core.get("layers"), list):
        return
    turn = PackingTurn()
    for at, layer in enumerate(core.layers):
        core.layers[at] = _with_mixing(layer, turn)
    core[name] = LastNorm(core[name])
    model.packing = Packing(core[name], turn)


def packing_of(model: Any) -> Packing | None:
    """Return the packing of a model; None if the model cannot run several parts in one pass."""
    packing: Packing | None = getattr(model, "packing", None)
    return packing


def disable_packing(model: Any) -> None:
    """Disable packing for a model whose packed results are not exact."""
    model.packing = None


def _with_mixing(module: Any, turn: PackingTurn) -> Any:
    """Wrap the innermost modules that take a cache. Return `module`, or its wrapper if `module` is the innermost
    itself.
    """
    if not isinstance(module, nn.Module) or not _has_mixing(module):
        return module
    inner = {name: child for name, child in module.children().items() if _has_mixing(child)}
    for name, child in inner.items():
        module[name] = _with_mixing(child, turn)
    return module if inner else Mixing(module, turn)


def _has_mixing(module: Any) -> bool:
    return isinstance(module, nn.Module) and any(_mixes(type(each)) for each in module.modules())


@cache
def _mixes(kind: type) -> bool:
    names = list(inspect.signature(kind.__call__).parameters)[2:]
    return "cache" in names and set(names) <= _ARGUMENTS


def _own(value: Any, at: int) -> Any:
    if isinstance(value, PackedRows):
        return value.caches[at]
    return value.of[at] if isinstance(value, _Masks) else value
