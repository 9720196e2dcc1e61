"""EAGLE-3: a head that is fed with the states of three of the target's layers, and has a vocabulary of its own.

The layers are mlx-vlm's; its loop and caches are not used.
"""

from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache


class EagleHead:
    """A drafter of the form that Speculators and SGLang write, as mlx-vlm loads it."""

    def __init__(self, model: Any, target: Any, vocab: int) -> None:
        self._model = model.bind(target)
        self._vocab = vocab
        self.size = int(model.hidden_size)
        self.tokens = int(self._model.embed_tokens.weight.shape[0])
        # The layers whose inputs it is made of.
        self.places: list[int] = [int(at) for at in model.config.target_layer_ids]
        ids = mx.arange(model.draft_vocab_size)
        self._ids = ids if model.d2t is None else ids + model.d2t

    @classmethod
    def load(cls, path: Path, target: Any, vocab: int) -> "EagleHead":
        """Raises ValueError where it does not fit."""
        from mlx_vlm.speculative.drafters import load_drafter

        model: Any
        model, kind = load_drafter(str(path))
        if kind != "eagle3":
            raise ValueError(f"it is a drafter of the kind {kind}")
        head = cls(model, target, vocab)
        lowest: Any = mx.min(head._ids).item()
        highest: Any = mx.max(head._ids).item()
        # Drafts are looked up in its own table of embeddings, too: beyond its end there is other memory.
        if lowest < 0 or highest >= min(vocab, head.tokens):
            raise ValueError("its tokens are not the target's")
        return head

    @property
    def parameters(self) -> Any:
        return self._model.parameters()

    def make_caches(self) -> list[Any]:
        return [KVCache() for _ in self._model.layers]

    def hidden(self, states: mx.array) -> mx.array:
        if self._model.input_norm is not None:
            states = self._model.input_norm(states)
        return self._model.fc(states)

    def __call__(self, tokens: mx.array, hidden: mx.array, caches: list[Any]) -> mx.array:
        first, *rest = self._model.layers
        mask = create_attention_mask(hidden, caches[0])
        hidden = first(self._model.embed_tokens(tokens), hidden, mask, caches[0], None)
        for layer, cache in zip(rest, caches[1:], strict=True):
            hidden = layer(hidden, mask, cache, None)
        return hidden

    def logits(self, hidden: mx.array) -> mx.array:
        hidden = self._model.norm(hidden)
        table = self._model.lm_head or self._model.embed_tokens.as_linear
        own = table(hidden)
        whole = mx.full((*own.shape[:-1], self._vocab), -mx.inf, dtype=own.dtype)
        whole[..., self._ids] = own
        return whole
