"""Memory that a worker takes beside KV and cached prefixes, by the weights of its model."""

from typing import Final

MIB: Final = 1 << 20
# Python, MLX and a tokenizer: 55 MiB were measured on Linux (docs/memory.md); Metal's own share was not.
OVERHEAD_BYTES: Final = 128 * MIB
# What the weights take beyond their size, and the buffers of a step: at least this, and this part of the weights.
BUFFER_BYTES: Final = 64 * MIB
BUFFER_PART: Final = 20
# Of a model with towers: features that it keeps at least, and what an encode and images on their way take beside them.
FEATURES_BYTES: Final = 64 * MIB
ENCODE_BYTES: Final = 128 * MIB


def fixed_bytes(weights_bytes: int, *, has_towers: bool) -> int:
    """Weights, the process, and the buffers of its steps."""
    towers = FEATURES_BYTES + ENCODE_BYTES if has_towers else 0
    return OVERHEAD_BYTES + weights_bytes + max(BUFFER_BYTES, weights_bytes // BUFFER_PART) + towers
