"""DFlash and DSpark heads, which draft a block of tokens in one pass, from hidden states of some of the target's
layers.

The modules are mlx-vlm's, except for attention, which supports the caches of a batch.

Attention of a block of drafted tokens to the block itself and to its row's cached context, for the rows of a batch.

mlx-vlm's attention supports caches of one length only. Here each row's block begins where the row's context ends, under
a mask per row; the projections are those of the wrapped mlx-vlm module.

Drafts of whole blocks, for the rows of a batch: one forward pass of the drafter per block.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache
from mlx_vlm.speculative.drafters import load_drafter
from mlx_vlm.speculative.drafters.dflash2 import DFlash2DraftModel
from mlx_vlm.speculative.drafters.dspark import DSparkDraftModel
from mlx_vlm.speculative.drafters.laguna_dflash import LagunaDFlashDraftModel
from mlx_vlm.speculative.drafters.laguna_dflash.dflash import LagunaDFlashAttention
from mlx_vlm.speculative.drafters.muse_glimmer_assistant import MuseGlimmerAssistantDraftModel
from mlx_vlm.speculative.drafters.muse_glimmer_assistant.dflash import MuseGlimmerAssistantAttention
from mlx_vlm.speculative.drafters.qwen3_dflash import DFlashDraftModel
from mlx_vlm.speculative.drafters.qwen3_dflash.dflash import DFlashAttention

from worker.model.pass_costs import WIDTHS
from worker.speculation.drafters.model_drafts import bytes_per_token, columns
from worker.speculation.drafters.state_drafts import PendingStates, StateDrafts
from worker.speculation.drafters.target import evaluate_weights, tables, with_vocab
from worker.speculation.text_sources import DraftSource
from worker.vision.multimodal_merge import text_core


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


Choose = Callable[[mx.array, int], mx.array]
"""(logits `[rows, vocab]`, position in the block) -> ids `[rows]`."""
_MAX_DRAFT_TOKENS: Final = WIDTHS[-1] - 1
_FORMS: Final = (DFlashDraftModel, LagunaDFlashDraftModel, MuseGlimmerAssistantDraftModel)


class BlockHead:
    """Drafter of blocks, bound to its target."""

    def __init__(self, model: Any, target: Any, vocab: int) -> None:
        """Raises ValueError if the drafter was made for another model, or has an unsupported type."""
        wrapped = [wrap(getattr(layer, "self_attn", None)) for layer in getattr(model, "layers", ())]
        if not isinstance(model, _FORMS) or None in wrapped:
            raise ValueError(f"drafters of the form {type(model).__module__.split('.')[-2]} are not run")
        self._model: Any = model
        self._vocab = vocab
        core, config = text_core(target), model.config
        # The drafter takes the outputs of these layers. They are captured as the inputs of the layers that follow.
        self.places = [int(at) + 1 for at in config.target_layer_ids]
        if (
            self.places != sorted(set(self.places))
            or not self.places
            or not 0 < self.places[0] <= self.places[-1] <= len(core.layers)
        ):
            raise ValueError(f"it needs the layers {config.target_layer_ids} of a target that has {len(core.layers)}")
        self.longest = min(_MAX_DRAFT_TOKENS, int(config.block_size) - 1)
        if self.longest < 1:
            raise ValueError(f"its blocks have {config.block_size} tokens")
        embed, lm_head = tables(target)
        if model.embed_tokens is None:
            self._model.embed_tokens, self._model.embed_scale = embed, float(getattr(core, "embed_scale", 1.0))
        if model.lm_head is None:
            self._model.lm_head = lm_head
        self.tokens = int(self._model.embed_tokens.weight.shape[0])
        if not 0 <= config.mask_token_id < self.tokens:
            raise ValueError(f"its mask is token {config.mask_token_id}, and the target has {self.tokens}")
        if isinstance(model, DFlash2DraftModel):
            selector = self._model.candidate_selector
            known = min(each.weight.shape[0] for each in (selector.predecessor_codebook, selector.successor_codebook))
            if known < vocab:  # MLX would index beyond the table without an error
                raise ValueError(f"it selects among {known} tokens, and the target has {vocab}")
        for layer, attention in zip(self._model.layers, wrapped, strict=True):
            layer.self_attn = attention

    @classmethod
    def load(cls, path: Path, target: Any, vocab: int, dtype: mx.Dtype) -> tuple["BlockHead", int]:
        """Load the drafter in a folder; return it with the bytes of its own weights. Raises ValueError and mlx-vlm's
        errors.
        """
        model: Any
        model, _ = load_drafter(str(path))
        own_bytes = evaluate_weights(model, dtype)  # the target's tables are not among the weights yet
        return cls(model, target, vocab), own_bytes

    def make_caches(self) -> list[Any]:
        return [KVCache() for _ in self._model.layers]

    def keep(self, states: mx.array, caches: Sequence[Any]) -> None:
        """Append states of the target to the context, without drafting."""
        context = self._context(states)
        for layer, cache in zip(self._model.layers, caches, strict=True):
            layer.self_attn.keep(context, self._model.rope, cache)

    def __call__(
        self, anchors: mx.array, states: mx.array, lengths: Sequence[int], caches: Sequence[Any], count: int
    ) -> mx.array:
        """Return hidden states `[rows, count, size]` of the drafted tokens.

        `states` `[rows, width, …]` are the target's states, of which the first `lengths[i]` belong to row i. The tokens
        `anchors` `[rows, 1]` follow them, and then the `count` drafted tokens of each row.
        """
        config, width = self._model.config, states.shape[1]
        is_level = (
            caches[0].lengths.is_level
            and min(lengths) == width
            and caches[0].lengths.seen(width) == (caches[0].lengths.longest + width)
        )
        rows = BlockPass(caches[0].offset + mx.array(list(lengths), dtype=mx.int32), is_level)
        is_first = getattr(config, "sample_from_anchor", False)
        masks = mx.full((anchors.shape[0], count - is_first), config.mask_token_id, dtype=anchors.dtype)
        hidden = self._model._embed_input_tokens(mx.concatenate([anchors, masks], axis=1))
        context = self._context(states)
        for layer, cache in zip(self._model.layers, caches, strict=True):
            hidden = layer(hidden, context, self._model.rope, BlockLayerCache(cache, rows))
        return self._model.norm(hidden)[:, 0 if is_first else 1 :]

    def choose(self, hidden: mx.array, anchors: mx.array, choose: Choose) -> list[mx.array]:
        """Choose the ids `[rows]` of each position from the hidden states of a block."""
        logits = with_vocab(self._model._logits(hidden), self._vocab)
        before, chosen = anchors[:, 0], list[mx.array]()
        for at in range(hidden.shape[1]):
            own = logits[:, at]
            if isinstance(self._model, DSparkDraftModel):
                own = with_vocab(self._model.markov_head.apply_step_logits(own, before), self._vocab)
            elif isinstance(self._model, DFlash2DraftModel):
                own = self._selected(hidden[:, at], own, before)
            before = choose(own, at)
            chosen.append(before)
        return chosen

    def _selected(self, hidden: mx.array, logits: mx.array, before: mx.array) -> mx.array:
        """Return the scores of the best tokens, which depend on the preceding token (DFlash 2); all other tokens have
        -inf.
        """
        selector = self._model.candidate_selector
        best = mx.argpartition(logits, -selector.top_k, axis=-1)[:, -selector.top_k :]
        paths = selector.predecessor_codebook(before) * selector.hidden_projection(hidden)
        scores = mx.take_along_axis(logits, best, axis=-1)
        scores = scores + mx.sum(paths[:, None] * selector.successor_codebook(best), axis=-1)
        return mx.put_along_axis(mx.full(logits.shape, -mx.inf, dtype=scores.dtype), best, scores, axis=-1)

    def _context(self, states: mx.array) -> mx.array:
        model = self._model
        if isinstance(model, MuseGlimmerAssistantDraftModel):
            return model.encoder(states)
        if isinstance(model, LagunaDFlashDraftModel):
            norms = model.aux_hidden_norms
            parts = mx.split(states, len(norms), axis=-1)
            states = mx.concatenate([norm(part) for norm, part in zip(norms, parts, strict=True)], axis=-1)
        return model.hidden_norm(model.fc(states))


# Number of a prompt's last tokens whose states a block attends to.
_PROMPT_TAIL_TOKENS: Final = 512


class BlockDrafts(StateDrafts):
    """Proposer that uses a drafter of the DFlash family."""

    def __init__(self, head: BlockHead, size: int, dtype: mx.Dtype) -> None:
        """`size` is the width of the target's hidden states; the drafter takes those of several layers."""
        super().__init__(DraftSource.BLOCK, head.tokens, head.make_caches, _PROMPT_TAIL_TOKENS)
        self._head = head
        self.longest = head.longest
        caches = head.make_caches()
        head.keep(mx.zeros((1, 1, size * len(head.places)), dtype), caches)
        self.token_bytes = bytes_per_token(caches)

    def _run(self, states: PendingStates, caches: list[Any]) -> None:
        self._head.keep(states.joined()[None, :-1], caches)

    def _draft(self, rows: Sequence[PendingStates | None], lengths: Sequence[int], count: int) -> list[list[int]]:
        anchors = self._inputs([[0 if states is None else states.newest] for states in rows])
        hidden = self._head(anchors, self._batched(rows, max(lengths)), lengths, self._rows.caches, count)
        self._rows.accept(lengths)
        return columns(self._head.choose(hidden, anchors, self._drawn))
