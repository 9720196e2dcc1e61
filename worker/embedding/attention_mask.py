"""Masks of encoders, for rows that are padded on the right and for layers with a window."""

from collections.abc import Sequence

import mlx.core as mx


def attention_mask(lengths: Sequence[int], window: int = 0) -> mx.array | None:
    """True where a token sees another: in its row, and no further away than `window` (0 is any distance).

    None where all see all. A token always sees itself: a row of the mask without any would make NaN, and padding that
    is NaN would spoil the values that others read, weighted with 0.
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
