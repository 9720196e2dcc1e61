"""Logits of drafters in the width of the target's: the noise that tokens are drawn with depends on their number."""

import mlx.core as mx


def as_wide(logits: mx.array, vocab: int) -> mx.array:
    """Logits `[…, vocab]`: tokens that only the drafter has are left out, and those that it lacks never come."""
    logits = logits[..., :vocab]
    missing = vocab - logits.shape[-1]
    if not missing:
        return logits
    return mx.pad(logits, [*[(0, 0)] * (logits.ndim - 1), (0, missing)], constant_values=-mx.inf)
