"""Head for multi-token prediction (MTP): one more layer, which predicts a token from the hidden state two positions
before it and the token between them.

`head_forms.py` describes the heads of published checkpoints. The layer is of the target's own class, so it supports the
caches of a batch.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import CacheList, KVCache

from worker.speculation.drafters.head_forms import HeadForm

Transform = Callable[[mx.array], mx.array]


class PredictionHead(nn.Module):
    """Prediction head bound to its target. It uses the target's embedding table and `lm_head`, or its own.

    Its output is a hidden state, from which logits are computed. When the head continues after its own draft, this
    state replaces the target's.
    """

    def __init__(
        self, layer: Any, size: int, eps: float, form: HeadForm, *, has_norm: bool = True, has_bias: bool = False
    ) -> None:
        super().__init__()
        self.enorm = nn.RMSNorm(size, eps=eps)
        self.hnorm = nn.RMSNorm(size, eps=eps)
        self.fc = nn.Linear(2 * size, size, bias=has_bias)
        self.layer = layer
        self.norm = nn.RMSNorm(size, eps=eps) if has_norm else nn.Identity()
        self.size = size
        # Size of the sliding window of the layer's attention; None if the layer attends to all tokens.
        self.window: int | None = None
        # Number of the layer's caches: one for KV and, with sparse attention, a second one for the index.
        self.caches = 1
        self._form = form
        self.tokens = 0
        # `bind` sets this field and the next one. The underscores keep both fields out of the head's parameters.
        self._tables: tuple[Transform, Transform]
        self._final: Transform

    def bind(self, embed: Any, lm_head: Transform, final: Transform) -> None:
        """Set the embedding table, the function from hidden states to logits, and the target's last norm."""
        self._tables, self._final = (embed, lm_head), final
        self.tokens = int(embed.weight.shape[0])

    def make_caches(self) -> list[Any]:
        return [KVCache() if self.caches == 1 else CacheList(*(KVCache() for _ in range(self.caches)))]

    def hidden(self, states: mx.array) -> mx.array:
        """Return the head's input: the captured states, after the target's last norm if the head takes normalized
        states."""
        return states if self._form.is_fed_raw else self._final(states)

    def __call__(self, tokens: mx.array, hidden: mx.array, caches: list[Any]) -> mx.array:
        """Return hidden states `[rows, width, size]`, given ids `[rows, width]` and the hidden states before them."""
        cache = caches[0]
        seen = cache[0] if self.caches > 1 else cache
        pair = [self.enorm(self._tables[0](tokens)), self.hnorm(hidden)]
        x = self.fc(mx.concatenate(pair[::-1] if self._form.is_hidden_first else pair, axis=-1))
        mask = create_attention_mask(x, seen, window_size=self.window, return_array=x.shape[1] > 1)
        state = self.layer(x, mask, cache=cache)
        return state if self._form.is_fed_raw else self.norm(state)

    def logits(self, hidden: mx.array) -> mx.array:
        return self._tables[1](self.norm(hidden) if self._form.is_fed_raw else hidden)
