"""Encoders: BERT, RoBERTa and XLM-R, ModernBERT and nomic-bert as one stack of layers with the norm before or after.

mlx-vlm's encoders are not used, because they approximate GELU for ModernBERT and do not include nomic-bert: equal
results need the exact activation and the masks of `attention_mask`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn

from worker.embedding.pooling import pooled

ACTIVATIONS: Final[dict[str, Callable[[mx.array], mx.array]]] = {
    "gelu": nn.gelu,
    "gelu_new": nn.gelu_approx,
    "gelu_pytorch_tanh": nn.gelu_approx,
    "relu": nn.relu,
    "silu": nn.silu,
    "swiglu": nn.silu,
    "tanh": mx.tanh,
}


@dataclass(frozen=True, slots=True)
class EncoderShape:
    """Sizes and variants of an encoder. `first_position` is the index of the first token's position embedding, if
    positions are learned.

    `windows` and `thetas` have an entry for each layer; a window of 0 means full attention, a theta of 0 no rotation.
    """

    layers: int
    width: int
    heads: int
    inner: int
    vocabulary: int
    positions: int
    first_position: int = 0
    types: int = 0
    epsilon: float = 1e-12
    activation: str = "gelu"
    # Whether layers normalize their input instead of their output; if so, one more norm follows the last layer.
    is_prenorm: bool = False
    is_gated: bool = False
    has_attention_bias: bool = True
    has_inner_bias: bool = True
    has_norm_bias: bool = True
    has_learned_positions: bool = True
    windows: tuple[int, ...] = ()
    thetas: tuple[float, ...] = ()

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def max_tokens(self) -> int:
        return self.positions - self.first_position


class _Embeddings(nn.Module):
    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        self._first = shape.first_position
        self.word = nn.Embedding(shape.vocabulary, shape.width)
        if shape.has_learned_positions:
            self.position = nn.Embedding(shape.positions, shape.width)
        if shape.types:
            self.type = nn.Embedding(shape.types, shape.width)
        self.norm = nn.LayerNorm(shape.width, eps=shape.epsilon, bias=shape.has_norm_bias)

    def __call__(self, ids: mx.array, types: mx.array | None) -> mx.array:
        hidden = self.word(ids)
        if "type" in self:
            hidden = hidden + self.type(mx.zeros_like(ids) if types is None else types)
        if "position" in self:
            hidden = hidden + self.position(mx.arange(self._first, self._first + ids.shape[1]))
        return self.norm(hidden)


class _Attention(nn.Module):
    def __init__(self, shape: EncoderShape, theta: float) -> None:
        super().__init__()
        self._heads, self._width, self._theta = shape.heads, shape.head_width, theta
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=shape.has_attention_bias)
        self.out = nn.Linear(shape.width, shape.width, bias=shape.has_attention_bias)

    def __call__(self, hidden: mx.array, mask: mx.array | None) -> mx.array:
        rows, length, width = hidden.shape
        heads = self.qkv(hidden).reshape(rows, length, 3, self._heads, self._width).transpose(2, 0, 3, 1, 4)
        queries, keys, values = heads[0], heads[1], heads[2]
        if self._theta:
            queries, keys = self._rotated(queries), self._rotated(keys)
        mixed = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=self._width**-0.5, mask=mask)
        return self.out(mixed.transpose(0, 2, 1, 3).reshape(rows, length, width))

    def _rotated(self, heads: mx.array) -> mx.array:
        return mx.fast.rope(heads, self._width, traditional=False, base=self._theta, scale=1.0, offset=0)


class _Inner(nn.Module):
    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        self._activate = ACTIVATIONS[shape.activation]
        self.up = nn.Linear(shape.width, shape.inner, bias=shape.has_inner_bias)
        if shape.is_gated:
            self.gate = nn.Linear(shape.width, shape.inner, bias=shape.has_inner_bias)
        self.down = nn.Linear(shape.inner, shape.width, bias=shape.has_inner_bias)

    def __call__(self, hidden: mx.array) -> mx.array:
        if "gate" in self:
            return self.down(self._activate(self.gate(hidden)) * self.up(hidden))
        return self.down(self._activate(self.up(hidden)))


class _Layer(nn.Module):
    def __init__(self, shape: EncoderShape, at: int) -> None:
        super().__init__()
        self._is_prenorm = shape.is_prenorm
        self.attention = _Attention(shape, shape.thetas[at] if shape.thetas else 0.0)
        self.inner = _Inner(shape)
        # ModernBERT's first layer directly follows the norm of the embeddings, so it has no norm of its own.
        if not (shape.is_prenorm and at == 0):
            self.attention_norm = nn.LayerNorm(shape.width, eps=shape.epsilon, bias=shape.has_norm_bias)
        self.inner_norm = nn.LayerNorm(shape.width, eps=shape.epsilon, bias=shape.has_norm_bias)

    def __call__(self, hidden: mx.array, mask: mx.array | None) -> mx.array:
        if not self._is_prenorm:
            hidden = self.attention_norm(hidden + self.attention(hidden, mask))
            return self.inner_norm(hidden + self.inner(hidden))
        normed = self.attention_norm(hidden) if "attention_norm" in self else hidden
        hidden = hidden + self.attention(normed, mask)
        return hidden + self.inner(self.inner_norm(hidden))


class _Classifier(nn.Module):
    """Two layers that score hidden states: those of the first token, or the mean of all tokens."""

    def __init__(self, shape: EncoderShape, activation: str, norm_bias: bool | None, is_mean: bool, bias: bool) -> None:
        super().__init__()
        self._activate, self._is_mean = ACTIVATIONS[activation], is_mean
        self.dense = nn.Linear(shape.width, shape.width, bias=bias)
        if norm_bias is not None:
            self.norm = nn.LayerNorm(shape.width, eps=shape.epsilon, bias=norm_bias)
        self.score = nn.Linear(shape.width, 1)

    def __call__(self, hidden: mx.array, lengths: Sequence[int]) -> mx.array:
        vectors = pooled("mean" if self._is_mean else "cls", hidden, mx.array(list(lengths)))
        vectors = self._activate(self.dense(vectors))
        return self.score(self.norm(vectors) if "norm" in self else vectors)[:, 0]


class EncoderModel(nn.Module):
    """Encoder from token ids to hidden states. A reranker's `classifier` scores them."""

    def __init__(self, shape: EncoderShape, classifier: dict[str, Any] | None = None) -> None:
        super().__init__()
        self._windows = shape.windows or (0,) * shape.layers
        self.embeddings = _Embeddings(shape)
        self.layers = [_Layer(shape, at) for at in range(shape.layers)]
        if shape.is_prenorm:
            self.norm = nn.LayerNorm(shape.width, eps=shape.epsilon, bias=shape.has_norm_bias)
        if classifier is not None:
            self.classifier = _Classifier(shape, **classifier)

    def __call__(self, ids: mx.array, lengths: Sequence[int], types: mx.array | None = None) -> mx.array:
        """Return the hidden states `[rows, longest, width]` of rows that are padded on the right."""
        masks = {window: attention_mask(lengths, window) for window in set(self._windows)}
        hidden = self.embeddings(ids, types)
        for layer, window in zip(self.layers, self._windows, strict=True):
            hidden = layer(hidden, masks[window])
        return self.norm(hidden) if "norm" in self else hidden


def attention_mask(lengths: Sequence[int], window: int = 0) -> mx.array | None:
    """Return a mask that is true where a token attends to another: in its row, and within `window` (0 means any
    distance).

    Return None if every token attends to all. A token always attends to itself: an empty mask row would give NaN, and
    padding with NaN would spoil the values of other tokens even at weight 0.
    """
    longest = max(lengths)
    is_padded = min(lengths) < longest
    has_window = 0 < window < longest - 1
    if not is_padded and not has_window:
        return None
    at = mx.arange(longest)
    is_token = (at[None] < mx.array(list(lengths))[:, None])[:, None, None, :]
    if not has_window:
        return is_token
    distance = mx.abs(at[:, None] - at[None])
    return (is_token & (distance <= window)[None, None]) | (distance == 0)[None, None]
