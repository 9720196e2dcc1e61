"""DFlash and DSpark heads, which draft a block of tokens in one pass, from hidden states of some of the target's
layers.

The modules are mlx-vlm's, except for attention, which supports the caches of a batch.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from mlx_lm.models.cache import KVCache
from mlx_vlm.speculative.drafters import load_drafter
from mlx_vlm.speculative.drafters.dflash2 import DFlash2DraftModel
from mlx_vlm.speculative.drafters.dspark import DSparkDraftModel
from mlx_vlm.speculative.drafters.laguna_dflash import LagunaDFlashDraftModel
from mlx_vlm.speculative.drafters.muse_glimmer_assistant import MuseGlimmerAssistantDraftModel
from mlx_vlm.speculative.drafters.qwen3_dflash import DFlashDraftModel

from worker.model.pass_costs import WIDTHS
from worker.speculation.drafters.block_attention import BlockLayerCache, BlockPass, wrap
from worker.speculation.drafters.target import evaluate_weights, tables, with_vocab
from worker.vision.multimodal_merge import text_core

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
