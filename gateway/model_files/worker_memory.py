"""Estimated memory of a worker without KV and cached prefixes, by its model's weights."""

from typing import Final

MIB: Final = 1 << 20
# Python, MLX and a tokenizer take 55 MiB on Linux as measured (docs/memory.md); Metal's share was not measured.
OVERHEAD_BYTES: Final = 128 * MIB
# Buffers of a step, and the overhead of the weights, take at least BUFFER_BYTES, and a fraction of the weights.
BUFFER_BYTES: Final = 64 * MIB
BUFFER_PART: Final = 20
# A model with towers keeps at least these cached features; encoding, and images in transit, need this much more.
FEATURES_BYTES: Final = 64 * MIB
ENCODE_BYTES: Final = 128 * MIB


def fixed_bytes(weights_bytes: int, *, has_towers: bool) -> int:
    """Sum up the weights, the process, and the buffers of its steps."""
    towers = FEATURES_BYTES + ENCODE_BYTES if has_towers else 0
    return OVERHEAD_BYTES + weights_bytes + max(BUFFER_BYTES, weights_bytes // BUFFER_PART) + towers
