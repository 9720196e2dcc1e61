"""Check at model load that a model can run a prompt with gaps, for sparse prefill: the model must take positions from
its caches.

Log-probabilities after a gap are compared with those of the whole text in which the tokens of the gap are masked.
"""

from typing import Any, Final

import mlx.core as mx

from worker.kv import batched
from worker.kv.kv import leaves
from worker.kv.quantized import make_caches
from worker.kv.ragged import RaggedKVCache
from worker.sparse.selected_tokens import SelectedTokens

PROMPT_TOKENS: Final = 24
# Tokens [begin, end) of the two runs; the tokens between them are the gap.
_RUNS: Final = ((0, 6), (13, PROMPT_TOKENS))
# Maximum deviation of the top tokens' log-probabilities in float32.
EXACT_LIMIT: Final = 1e-3
# Maximum deviation of the top tokens' log-probabilities in 16 bits.
ROUNDED_LIMIT: Final = 0.5
_TOP_TOKENS: Final = 8


class _GapMaskCache:
    """Cache of one row whose mask hides the gap from the tokens after it."""

    def __init__(self, cache: RaggedKVCache) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def make_mask(self, count: int, *_args: Any, **_named: Any) -> mx.array:
        rows, slots = mx.arange(count)[:, None], mx.arange(self._cache.lengths.seen(count))[None]
        begin, end = _RUNS[0][1], _RUNS[1][0]
        is_hidden = (slots >= begin) & (slots < end) & (rows >= end)
        return ((slots <= rows) & ~is_hidden)[None, None]


def gap_problem(model: Any, vocab_size: int) -> str:
    """Return the reason why this model cannot have gaps in a prompt; empty if it can."""
    caches = make_caches(model)
    if any(not isinstance(leaf, RaggedKVCache) for leaf in leaves(batched.merge([caches]))):
        return "some of its layers keep a sliding window or a recurrent state, which needs every token"
    ids = [(20 + 7 * at) % vocab_size for at in range(PROMPT_TOKENS)]
    try:
        whole, sparse = _whole(model, ids), _sparse(model, ids)
        is_exact = whole.dtype == mx.float32 and mx.default_device() == mx.cpu
        whole, sparse = whole.astype(mx.float32), sparse.astype(mx.float32)
        mx.eval(whole, sparse)
    except Exception as error:  # code of any architecture may raise any error
        return f"{type(error).__name__}: {error}"
    top = mx.argpartition(-whole, kth=_TOP_TOKENS - 1)[:_TOP_TOKENS]
    deviation: Any = mx.abs(whole[top] - sparse[top]).max().item()
    if not deviation <= (EXACT_LIMIT if is_exact else ROUNDED_LIMIT):
        return f"its positions do not follow its caches: log-probabilities behind a gap differ by {deviation:.2g}"
    return ""


def _whole(model: Any, ids: list[int]) -> mx.array:
    caches = batched.merge([make_caches(model)])
    return _last(model(mx.array([ids]), cache=[_hiding(cache) for cache in caches]))


def _sparse(model: Any, ids: list[int]) -> mx.array:
    caches, kept, done = batched.merge([make_caches(model)]), SelectedTokens(_RUNS), 0
    logits = mx.array([])
    for begin, end in kept.runs:
        batched.place(caches, [kept.position_offset(done)])
        logits = model(mx.array([ids[begin:end]]), cache=caches)
        done += end - begin
    return _last(logits)


def _hiding(cache: Any) -> Any:
    children = getattr(cache, "caches", None)
    return type(cache)(*map(_hiding, children)) if children is not None else _GapMaskCache(cache)


def _last(logits: mx.array) -> mx.array:
    """Return log-probabilities after the last token."""
    last = logits[0, -1]
    return last - mx.logsumexp(last)
