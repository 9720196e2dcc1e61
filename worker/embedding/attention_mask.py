"""Attention masks of encoders, for rows padded on the right and for layers with a window."""

from collections.abc import Sequence

import mlx.core as mx


def attention_mask(lengths: Sequence[int], window: int = 0) -> mx.array | None:
    """Return True where a token attends to another: in its row, and within `window` (0 means any distance).

    None if every token attends to all. A token always attends to itself: an empty mask row would give NaN, and padding
    with NaN would spoil the values of other tokens even at weight 0.
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
