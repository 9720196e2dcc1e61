"""Estimated memory of a worker, by its model's weights. KV and cached prefixes are not included."""

from typing import Final

MIB: Final = 1 << 20
# Python, MLX and a tokenizer take 55 MiB on Linux as measured (docs/memory.md); Metal's share was not measured.
OVERHEAD_BYTES: Final = 128 * MIB
# The buffers of a step and the overhead of the weights take a fraction of the weights, but at least BUFFER_BYTES.
BUFFER_BYTES: Final = 64 * MIB
BUFFER_PART: Final = 20
# A model with towers caches at least FEATURES_BYTES of features; encoding, and images in transit, need ENCODE_BYTES
# more.
FEATURES_BYTES: Final = 64 * MIB
ENCODE_BYTES: Final = 128 * MIB


def fixed_bytes(weights_bytes: int, *, has_towers: bool) -> int:
    """Return the memory of the weights, of the process, and of the buffers of its steps."""
    towers = FEATURES_BYTES + ENCODE_BYTES if has_towers else 0
    return OVERHEAD_BYTES + weights_bytes + max(BUFFER_BYTES, weights_bytes // BUFFER_PART) + towers
