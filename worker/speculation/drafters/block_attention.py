"""Attention of a block, for the rows of a batch: on the block itself, and on each row's context, whose keys and values
stay in its cache.

mlx-vlm's attention runs on a cache of one length, and trims what it is given. Here each row's block begins where its
context ends, a mask says what of the context it sees, and the projections are the wrapped module's own.
"""

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_vlm.speculative.drafters.laguna_dflash.dflash import LagunaDFlashAttention
from mlx_vlm.speculative.drafters.muse_glimmer_assistant.dflash import MuseGlimmerAssistantAttention
from mlx_vlm.speculative.drafters.qwen3_dflash.dflash import DFlashAttention


@dataclass(slots=True, frozen=True)
class Sight:
    """Tokens that one of a block sees: of the context the last `window - 1`, or all; of the block all, or those up to
    itself with `is_causal`. With `is_own` the window is counted back from each token, else from where the block begins.
    """

    window: int | None = None
    is_causal: bool = False
    is_own: bool = False


@dataclass(slots=True, eq=False)
class Pass:
    """Rows of one pass: where their blocks begin, `[rows]`, and whether all slots before are theirs."""

    begins: mx.array
    is_level: bool
    masks: dict[tuple[int, int, Sight], mx.array] = field(default_factory=dict)

    def mask(self, slots: int, width: int, sight: Sight) -> mx.array | None:
        """`[rows, 1, width, slots + width]`: what each token of a block sees of the context, and of the block."""
        if self.is_level and sight.window is None and not sight.is_causal:
            return None
        key = slots, width, sight
        if key not in self.masks:
            own, other = mx.arange(width)[:, None], mx.arange(width)[None]
            at, begins = mx.arange(slots)[None, None], self.begins[:, None, None]
            context = mx.broadcast_to(at < begins, (self.begins.shape[0], width, slots))
            block = other <= own if sight.is_causal else mx.ones((width, width), dtype=mx.bool_)
            if sight.window is not None:
                first = begins - sight.window + (own if sight.is_own else 0)
                context = context & (at > first)
                block = block & (other > own - sight.window) if sight.is_own else block
            whole = mx.concatenate([context, mx.broadcast_to(block, (context.shape[0], width, width))], axis=-1)
            self.masks[key] = whole[:, None]
        return self.masks[key]


@dataclass(slots=True, eq=False)
class Layer:
    """Argument of a layer in place of a cache."""

    cache: Any
    rows: Pass


class BlockAttention(nn.Module):
    """Attention of DFlash and DSpark around a module of mlx-vlm."""

    def __init__(self, module: Any, sight: Sight) -> None:
        super().__init__()
        self.module = module
        self._sight = sight

    def keep(self, context: mx.array, rope: Any, cache: Any) -> tuple[mx.array, mx.array]:
        """Put keys and values of context behind those that a cache has; returns all of them."""
        _, keys, values = self._project(context)
        kept: tuple[mx.array, mx.array] = cache.update_and_fetch(rope(keys, offset=cache.offset), values)
        return kept

    def __call__(self, x: mx.array, context: mx.array, rope: Any, layer: Layer, _projected: object = None) -> mx.array:
        rows, width, _ = x.shape
        seen_keys, seen_values = self.keep(context, rope, layer.cache)
        begins = layer.rows.begins
        queries, keys, values = self._project(x)
        mixed = mx.fast.scaled_dot_product_attention(
            rope(queries, offset=begins),
            mx.concatenate([seen_keys, rope(keys, offset=begins)], axis=2),
            mx.concatenate([seen_values, values], axis=2),
            scale=self.module.scale,
            mask=layer.rows.mask(seen_keys.shape[2], width, self._sight),
            sinks=getattr(self.module, "attention_sink_bias", None),
        )
        mixed = self._gated(x, mixed.transpose(0, 2, 1, 3))
        return self.module.o_proj(mixed.reshape(rows, width, -1))

    def _project(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Queries and keys, not yet at their positions, and values `[rows, heads, width, dim]`."""
        attention = self.module
        keys = attention.k_proj(x)
        # Gemma's has one projection for both.
        values = attention.v_proj(x) if "v_proj" in attention else keys
        return self._headed(attention.q_proj(x), keys, values)

    def _headed(self, queries: mx.array, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        attention, (rows, width, _) = self.module, keys.shape
        queries = attention.q_norm(queries.reshape(rows, width, attention.n_heads, -1))
        keys = keys.reshape(rows, width, attention.n_kv_heads, -1)
        values = values.reshape(keys.shape)
        return queries.transpose(0, 2, 1, 3), attention.k_norm(keys).transpose(0, 2, 1, 3), values.transpose(0, 2, 1, 3)

    def _gated(self, _x: mx.array, mixed: mx.array) -> mx.array:
        return mixed


class LagunaAttention(BlockAttention):
    """Laguna's: one projection for all, and a gate for each head."""

    def _project(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        attention = self.module
        own, other = attention.n_heads * attention.head_dim, attention.n_kv_heads * attention.head_dim
        queries, keys, values = mx.split(attention.qkv_proj(x), [own, own + other], axis=-1)
        return self._headed(queries, keys, values)

    def _gated(self, _x: mx.array, mixed: mx.array) -> mx.array:
        gate = nn.softplus(self.module.g_proj(_x).astype(mx.float32)).astype(mixed.dtype)
        return mixed * gate[..., None]


def wrap(attention: Any) -> BlockAttention | None:
    """The attention of a layer as one for the rows of a batch; None for one of another form."""
    if isinstance(attention, DFlashAttention):
        window = attention.sliding_window if attention.is_sliding else None
        return BlockAttention(attention, Sight(window, attention.is_causal, attention.is_causal))
    if isinstance(attention, LagunaDFlashAttention):
        return LagunaAttention(attention, Sight(attention.sliding_window, attention.causal))
    if isinstance(attention, MuseGlimmerAssistantAttention):
        return BlockAttention(attention, Sight(attention.sliding_window + 1, is_own=True))
    return None
