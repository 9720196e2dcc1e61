"""Multimodal merge: wrappers of mlx-lm's text modules that insert embeddings of media, positions in space, deepstack
features, and attention within a medium.

Modules are wrapped once, when the model is loaded, and share one `MultimodalMerge`. In a forward pass without media,
they behave exactly like the modules that they wrap.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx_lm.models.base import create_attention_mask

from worker.vision.checkpoint import Mrope, Needs
from worker.vision.media import Span

_INNER: Final = ("language_model.model", "model.language_model", "model", "language_model")


@dataclass(slots=True, frozen=True)
class MediaFeatures:
    """Feature rows of one medium: embeddings `[tokens, width]`, and an array of the same shape for each deepstack
    layer.
    """

    embeds: mx.array
    layers: tuple[mx.array, ...] = ()

    @property
    def nbytes(self) -> int:
        return self.embeds.nbytes + sum(layer.nbytes for layer in self.layers)


@dataclass(slots=True, eq=False)
class MediaPlacement:
    """Media of one row and their places; `positions` are `[3, prompt]` for models with positions in space.

    `features` holds the features that the prefill still needs, by the medium's key.
    """

    spans: Sequence[Span]
    positions: npt.NDArray[np.int32] | None
    prompt_tokens: int
    features: dict[bytes, MediaFeatures] = field(default_factory=dict)
    # Index of the token after the last medium.
    end: int = field(init=False)
    last_delta: int = field(init=False)

    def __post_init__(self) -> None:
        self.end = max((span.end for span in self.spans), default=0)
        self.last_delta = 0 if self.positions is None else int(self.positions.max()) + 1 - self.prompt_tokens

    def delta(self, at: int) -> int:
        """Return the position of the text token `at` minus its index."""
        return self.last_delta if self.positions is None or at >= self.end else int(self.positions[0, at]) - at


class MultimodalMerge:
    """State shared by the wrapped modules; owned by the engine thread."""

    def __init__(self, model: Any, needs: Needs) -> None:
        # State of the forward pass that is being built; None without media.
        self.delta: mx.array | None = None
        self.chunk: MediaChunk | None = None
        inner = text_core(model)
        inner.embed_tokens = _Embed(inner.embed_tokens, self)
        if getattr(inner, "embed_tokens_per_layer", None) is not None:
            inner.embed_tokens_per_layer = _PerLayer(inner.embed_tokens_per_layer, self)
        for layer in model.layers if needs.mrope is not None else ():
            if hasattr(layer, "self_attn"):
                assert needs.mrope is not None
                layer.self_attn.rope = _Rope(layer.self_attn.rope, self, needs.mrope)
        for at in range(needs.deepstack):
            inner.layers[at] = _Deep(inner.layers[at], self, at)
        if needs.block:
            windows = _windows(inner)
            for at, window in enumerate(windows):
                if needs.block == "all" or window:
                    inner.layers[at] = _SpanLayer(inner.layers[at], self, window)

    @contextmanager
    def rows(
        self, placed: Sequence[MediaPlacement | None], starts: Sequence[int], lengths: Sequence[int], width: int
    ) -> Generator[None]:
        """Set up the forward pass that is built inside this context: row i has `lengths[i]` tokens, the first at
        `starts[i]`.
        """
        deltas = [0 if row is None else row.delta(start) for row, start in zip(placed, starts, strict=True)]
        self.delta = mx.array(deltas, dtype=mx.int32) if any(deltas) else None
        self.chunk = _chunk(placed, starts, lengths, width)
        try:
            yield
        finally:
            self.delta = self.chunk = None


@dataclass(slots=True, eq=False)
class MediaChunk:
    """Media of one forward pass of `[rows, width]` tokens."""

    # Each part is a row, the slice of its tokens in the chunk, the features, and the slice of the feature rows.
    parts: list[tuple[int, slice, MediaFeatures, slice]]
    # Array `[rows, width]`, true for placeholders.
    is_media: mx.array
    # Positions `[3, rows, width]` in time, height and width, valid where `is_media`.
    positions: mx.array | None
    # Array `[rows, 1, width, width]`, true for pairs of tokens of one image or frame.
    block: npt.NDArray[np.bool_]
    masks: dict[int, mx.array] = field(default_factory=dict)

    def place(self, x: mx.array, layer: int | None = None) -> mx.array:
        """Write the features to their places in `x` `[rows, width, …]` and return the result."""
        for row, here, features, there in self.parts:
            if layer is None:
                x[row, here] = features.embeds[there].astype(x.dtype)
            elif layer < len(features.layers):
                x[row, here] = features.layers[layer][there].astype(x.dtype)
        return x


def _chunk(
    placed: Sequence[MediaPlacement | None], starts: Sequence[int], lengths: Sequence[int], width: int
) -> MediaChunk | None:
    if all(row is None or start >= row.end for row, start in zip(placed, starts, strict=True)):
        return None
    parts: list[tuple[int, slice, MediaFeatures, slice]] = []
    is_media = np.zeros((len(placed), width), dtype=bool)
    positions: npt.NDArray[np.int32] | None = None
    block = np.zeros((len(placed), 1, width, width), dtype=bool)
    for at, (row, start, length) in enumerate(zip(placed, starts, lengths, strict=True)):
        for span in row.spans if row is not None and start < row.end else ():
            low, high = max(span.begin, start), min(span.end, start + length)
            if row is None or low >= high:
                continue
            here = slice(low - start, high - start)
            first = span.first - span.begin
            parts.append((at, here, row.features[span.medium.key], slice(low + first, high + first)))
            is_media[at, here] = True
            # Attention to audio stays causal.
            block[at, 0, here, here] = span.medium.kind != "audio"
            if row.positions is not None:
                if positions is None:
                    positions = np.zeros((3, len(placed), width), dtype=np.int32)
                positions[:, at, here] = row.positions[:, low:high]
    if not parts:
        return None
    in_space = None if positions is None else mx.array(positions)
    return MediaChunk(parts, mx.array(is_media), in_space, block)


def merge_of(model: Any) -> MultimodalMerge | None:
    """Return the merge of a model that takes media; None for other models."""
    return getattr(model, "multimodal_merge", None)


def text_core(model: Any) -> Any:
    """Return the part of an mlx-lm model that has the embedding table and the layers. Raises ValueError."""
    for path in _INNER:
        part = model
        for name in path.split("."):
            part = getattr(part, name, None)
        if part is not None and hasattr(part, "embed_tokens"):
            return part
    raise ValueError("the text model has no table of embeddings")


def _windows(inner: Any) -> list[int]:
    """Return the width of each layer's sliding window, 0 for none."""
    size = int(getattr(inner, "window_size", 0) or 0)
    kinds = [getattr(layer, "layer_type", None) for layer in inner.layers]
    if any(kinds):
        return [size if kind == "sliding_attention" else 0 for kind in kinds]
    return [size if getattr(layer.self_attn, "is_sliding", False) else 0 for layer in inner.layers]


class WrappedModule(nn.Module):
    """Wrapper of a module that exposes the module's attributes."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class _MergeWrapper(WrappedModule):
    """Wrapper that shares the state of the merge."""

    def __init__(self, module: Any, merge: MultimodalMerge) -> None:
        super().__init__(module)
        self._merge = merge


class _Embed(_MergeWrapper):
    def __call__(self, ids: mx.array) -> mx.array:
        chunk = self._merge.chunk
        if chunk is None:
            return self.module(ids)
        # Placeholders are replaced by id 0, because their own ids may lie beyond the table.
        return chunk.place(self.module(mx.where(chunk.is_media, 0, ids)))


class _PerLayer(_MergeWrapper):
    """Embedding table of per-layer inputs; media get the row of token 0."""

    def __call__(self, ids: mx.array) -> mx.array:
        chunk = self._merge.chunk
        return self.module(ids if chunk is None else mx.where(chunk.is_media, 0, ids))


class _Rope(_MergeWrapper):
    """Rotary embedding in time, height and width.

    In text, the positions on all three axes advance together. This equals the plain embedding at an offset shifted by
    the media before the text.
    """

    def __init__(self, rope: Any, merge: MultimodalMerge, mrope: Mrope) -> None:
        super().__init__(rope, merge)
        dims, section = mrope.dims, mrope.section
        axis = np.repeat(np.arange(3), section)
        if mrope.is_interleaved:
            axis = np.zeros(dims // 2, dtype=np.int64)
            for k in (1, 2):
                axis[k : section[k] * 3 : 3] = k
        self._dims = dims
        self._axis = mx.array(axis.astype(np.int32))
        self._frequencies = 1.0 / (mrope.base ** (mx.arange(0, dims, 2).astype(mx.float32) / dims))

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        merge = self._merge
        turned = self.module(x, offset=offset if merge.delta is None else offset + merge.delta)
        chunk = merge.chunk
        if chunk is None or chunk.positions is None:
            return turned
        half = self._dims // 2
        angles = chunk.positions.astype(mx.float32)[self._axis].transpose(1, 2, 0) * self._frequencies
        cos, sin = mx.cos(angles)[:, None], mx.sin(angles)[:, None]
        a, b = x[..., :half].astype(mx.float32), x[..., half : self._dims].astype(mx.float32)
        in_space = mx.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)
        in_space = mx.concatenate([in_space, x[..., self._dims :]], -1)
        return mx.where(chunk.is_media[:, None, :, None], in_space, turned)


class _Deep(_MergeWrapper):
    """Layer followed by the addition of deepstack features."""

    def __init__(self, layer: Any, merge: MultimodalMerge, at: int) -> None:
        super().__init__(layer, merge)
        self._at = at

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        h, chunk = self.module(x, *args, **kwargs), self._merge.chunk
        if chunk is None:
            return h
        return h + chunk.place(mx.zeros(h.shape, dtype=h.dtype), self._at)


class _SpanLayer(_MergeWrapper):
    """Layer in which the tokens of a span attend to each other in both directions."""

    def __init__(self, layer: Any, merge: MultimodalMerge, window: int) -> None:
        super().__init__(layer, merge)
        self._window = window

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None, **kwargs: Any) -> Any:
        chunk = self._merge.chunk
        if chunk is not None:
            # A layer that shares another layer's KV has no cache of its own, so it reuses the mask of that layer.
            if self._window not in chunk.masks:
                chunk.masks[self._window] = self._mask(x, mask, cache, chunk)
            mask = chunk.masks[self._window]
        return self.module(x, mask, cache, **kwargs)

    def _mask(self, x: mx.array, mask: Any, cache: Any, chunk: MediaChunk) -> mx.array:
        rows, width = x.shape[:2]
        if not isinstance(mask, mx.array):
            mask = create_attention_mask(x, cache, window_size=self._window or None, return_array=True)
        if mask is None:
            mask = mx.ones((width, width), dtype=mx.bool_)
        mask = mx.broadcast_to(mask if mask.ndim == 4 else mask[None, None], (rows, 1, *mask.shape[-2:]))
        # Caches whose rows begin at slot 0 know each row's length; in other caches, the chunk is at the end of every
        # row.
        begins = getattr(getattr(cache, "lengths", None), "of", None) or [mask.shape[-1] - width] * rows
        pairs = np.zeros((rows, 1, width, mask.shape[-1]), dtype=bool)
        for row, begin in enumerate(begins):
            own = pairs[row, ..., begin : begin + width]  # the mask may lack slots for padding
            own[:] = chunk.block[row, ..., : own.shape[-1]]
        return mask | mx.array(pairs)
