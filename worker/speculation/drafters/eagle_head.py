"""EAGLE-3 head: its input is states of three of the target's layers, and it has a vocabulary of its own.

The layers are mlx-vlm's; mlx-vlm's loop and caches are not used.
"""

from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache

from worker.speculation.drafters.target import evaluate_weights
from worker.vision.multimodal_merge import text_core


class EagleHead:
    """EAGLE-3 drafter in the format of Speculators and SGLang, loaded by mlx-vlm and bound to its target."""

    def __init__(self, model: Any, target: Any, vocab: int, dtype: mx.Dtype) -> None:
        """Raises ValueError if the drafter was made for another model."""
        self._model = model.bind(target)
        self._vocab = vocab
        self.size = int(model.hidden_size)
        self.tokens = int(self._model.embed_tokens.weight.shape[0])
        # Indices of the target's layers whose inputs the head takes.
        self.places: list[int] = [int(at) for at in model.config.target_layer_ids]
        ids = mx.arange(model.draft_vocab_size)
        self._ids = ids if model.d2t is None else ids + model.d2t
        lowest: Any = mx.min(self._ids).item()
        highest: Any = mx.max(self._ids).item()
        # Drafted ids also index the head's own embedding table, and MLX checks no bounds.
        if lowest < 0 or highest >= min(vocab, self.tokens):
            raise ValueError("its tokens are not the target's")
        core = text_core(target)
        if not all(0 <= place < len(core.layers) for place in self.places):
            raise ValueError(f"it needs the layers {self.places} of a target that has {len(core.layers)}")
        self.hidden(mx.zeros((1, 1, core.norm.weight.shape[0] * len(self.places)), dtype))

    @classmethod
    def load(cls, path: Path, target: Any, vocab: int, dtype: mx.Dtype) -> tuple["EagleHead", int]:
        """Load the head in a folder; return it with its weights' bytes. Raises ValueError and mlx-vlm's errors."""
        from mlx_vlm.speculative.drafters import load_drafter

        model: Any
        model, kind = load_drafter(str(path))
        if kind != "eagle3":
            raise ValueError(f"it is a drafter of the kind {kind}")
        own_bytes = evaluate_weights(model, dtype)  # the target's tables are not among the weights yet
        return cls(model, target, vocab, dtype), own_bytes

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
