"""Heads for multi-token prediction (MTP): one more layer, which says of a position's last hidden state and of the token
after it which token follows that.

Its forms in checkpoints are in `head_forms.py`. The layer is of the target's own class, and so runs on the batch's
caches.
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
    """A head of a target with tables `embed` and `lm_head` of its own or of the target's.

    Its output is the hidden state that logits are made of, and that takes the place of the target's where the head is
    fed with its own draft.
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
        # Tokens that the layer sees; None for all.
        self.window: int | None = None
        # Of the layer: one of KV, or one with an index of it.
        self.caches = 1
        self._form = form
        self.tokens = 0
        # Not parameters of the head: the target's, or its own ones of the same form.
        self._tables: tuple[Transform, Transform] | None = None
        self._final: Transform | None = None

    def bind(self, embed: Any, lm_head: Transform, final: Transform) -> None:
        """Set the table of embeddings, the function from hidden states to logits, and the target's last norm."""
        self._tables, self._final = (embed, lm_head), final
        self.tokens = int(embed.weight.shape[0])

    def make_caches(self) -> list[Any]:
        return [KVCache() if self.caches == 1 else CacheList(*(KVCache() for _ in range(self.caches)))]

    def hidden(self, states: mx.array) -> mx.array:
        """Hidden states as the head takes them: where they are tapped, the target's last norm is still to come."""
        assert self._final is not None
        return states if self._form.is_fed_raw else self._final(states)

    def __call__(self, tokens: mx.array, hidden: mx.array, caches: list[Any]) -> mx.array:
        """Hidden states `[rows, width, size]` of ids `[rows, width]` and the hidden states before them."""
        assert self._tables is not None
        cache = caches[0]
        seen = cache[0] if self.caches > 1 else cache
        pair = [self.enorm(self._tables[0](tokens)), self.hnorm(hidden)]
        x = self.fc(mx.concatenate(pair[::-1] if self._form.is_hidden_first else pair, axis=-1))
        mask = create_attention_mask(x, seen, window_size=self.window, return_array=x.shape[1] > 1)
        state = self.layer(x, mask, cache=cache)
        return state if self._form.is_fed_raw else self.norm(state)

    def logits(self, hidden: mx.array) -> mx.array:
        assert self._tables is not None
        return self._tables[1](self.norm(hidden) if self._form.is_fed_raw else hidden)
