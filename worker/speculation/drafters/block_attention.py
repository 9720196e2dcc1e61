"""Attention of a block of drafted tokens to the block itself and to its row's cached context, for the rows of a batch.

mlx-vlm's attention supports caches of one length only. Here each row's block begins where the row's context ends, under
a mask per row; the projections are those of the wrapped mlx-vlm module.
"""

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_vlm.speculative.drafters.laguna_dflash.dflash import LagunaDFlashAttention
from mlx_vlm.speculative.drafters.muse_glimmer_assistant.dflash import MuseGlimmerAssistantAttention
from mlx_vlm.speculative.drafters.qwen3_dflash.dflash import DFlashAttention


@dataclass(slots=True, frozen=True)
class BlockMask:
    """Range of tokens that a token of a block attends to.

    In the context, a token attends to the last `window - 1` tokens, or to all if there is no window. In the block, a
    token attends to all tokens, or with `is_causal` only up to itself. With `is_own` the window ends at each token,
    otherwise at the beginning of the block.
    """

    window: int | None = None
    is_causal: bool = False
    is_own: bool = False


@dataclass(slots=True, eq=False)
class BlockPass:
    """Rows of one pass: the slots `[rows]` at which their blocks begin, and whether all rows fill all slots before
    them.
    """

    begins: mx.array
    is_level: bool
    masks: dict[tuple[int, int, BlockMask], mx.array] = field(default_factory=dict)

    def mask(self, slots: int, width: int, form: BlockMask) -> mx.array | None:
        """Return the mask `[rows, 1, width, slots + width]` over context and block; None if no slot is masked."""
        if self.is_level and form.window is None and not form.is_causal:
            return None
        key = slots, width, form
        if key not in self.masks:
            own, other = mx.arange(width)[:, None], mx.arange(width)[None]
            at, begins = mx.arange(slots)[None, None], self.begins[:, None, None]
            context = mx.broadcast_to(at < begins, (self.begins.shape[0], width, slots))
            block = other <= own if form.is_causal else mx.ones((width, width), dtype=mx.bool_)
            if form.window is not None:
                first = begins - form.window + (own if form.is_own else 0)
                context = context & (at > first)
                block = block & (other > own - form.window) if form.is_own else block
            whole = mx.concatenate([context, mx.broadcast_to(block, (context.shape[0], width, width))], axis=-1)
            self.masks[key] = whole[:, None]
        return self.masks[key]


@dataclass(slots=True, eq=False)
class BlockLayerCache:
    """Replacement of a layer's cache argument: the layer's own cache, and the rows of the pass."""

    cache: Any
    rows: BlockPass


class BlockAttention(nn.Module):
    """Attention of DFlash and DSpark for the rows of a batch, around mlx-vlm's module."""

    def __init__(self, module: Any, form: BlockMask) -> None:
        super().__init__()
        self.module = module
        self._form = form

    def keep(self, context: mx.array, rope: Any, cache: Any) -> tuple[mx.array, mx.array]:
        """Append the keys and values of new context to a cache; return all keys and values of the cache."""
        _, keys, values = self._project(context)
        kept: tuple[mx.array, mx.array] = cache.update_and_fetch(rope(keys, offset=cache.offset), values)
        return kept

    def __call__(
        self, x: mx.array, context: mx.array, rope: Any, layer: BlockLayerCache, _projected: object = None
    ) -> mx.array:
        rows, width, _ = x.shape
        seen_keys, seen_values = self.keep(context, rope, layer.cache)
        begins = layer.rows.begins
        queries, keys, values = self._project(x)
        mixed = mx.fast.scaled_dot_product_attention(
            rope(queries, offset=begins),
            mx.concatenate([seen_keys, rope(keys, offset=begins)], axis=2),
            mx.concatenate([seen_values, values], axis=2),
            scale=self.module.scale,
            mask=layer.rows.mask(seen_keys.shape[2], width, self._form),
            sinks=getattr(self.module, "attention_sink_bias", None),
        )
        mixed = self._gated(x, mixed.transpose(0, 2, 1, 3))
        return self.module.o_proj(mixed.reshape(rows, width, -1))

    def _project(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Return queries and keys before their rotary embedding, and values, all `[rows, heads, width, dim]`."""
        attention = self.module
        keys = attention.k_proj(x)
        # Drafters for Gemma have one projection for keys and values.
        values = attention.v_proj(x) if "v_proj" in attention else keys
        return self._headed(attention.q_proj(x), keys, values)

    def _headed(self, queries: mx.array, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        attention, (rows, width, _) = self.module, keys.shape
        queries = attention.q_norm(queries.reshape(rows, width, attention.n_heads, -1))
        keys = keys.reshape(rows, width, attention.n_kv_heads, -1)
        values = values.reshape(keys.shape)
        return queries.transpose(0, 2, 1, 3), attention.k_norm(keys).transpose(0, 2, 1, 3), values.transpose(0, 2, 1, 3)

    def _gated(self, x: mx.array, mixed: mx.array) -> mx.array:
        return mixed


class LagunaAttention(BlockAttention):
    """Attention of Laguna, with one projection for queries, keys and values, and a gate for each head."""

    def _project(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        attention = self.module
        own, other = attention.n_heads * attention.head_dim, attention.n_kv_heads * attention.head_dim
        queries, keys, values = mx.split(attention.qkv_proj(x), [own, own + other], axis=-1)
        return self._headed(queries, keys, values)

    def _gated(self, x: mx.array, mixed: mx.array) -> mx.array:
        gate = nn.softplus(self.module.g_proj(x).astype(mx.float32)).astype(mixed.dtype)
        return mixed * gate[..., None]


def wrap(attention: Any) -> BlockAttention | None:
    """Wrap a layer's attention for the rows of a batch; return None for an unknown type."""
    if isinstance(attention, DFlashAttention):
        window = attention.sliding_window if attention.is_sliding else None
        return BlockAttention(attention, BlockMask(window, attention.is_causal, attention.is_causal))
    if isinstance(attention, LagunaDFlashAttention):
        return LagunaAttention(attention, BlockMask(attention.sliding_window, attention.causal))
    if isinstance(attention, MuseGlimmerAssistantAttention):
        return BlockAttention(attention, BlockMask(attention.sliding_window + 1, is_own=True))
    return None
