"""Quantized KV of a model: whether its configuration allows it, the group size, and the bits per value."""

from collections.abc import Collection
from typing import Any, Final

# Possible group sizes. The values of a group share a scale and a bias; the first size that divides the head's width is
# used.
GROUPS: Final = (64, 32)
# Smallest number of bits per value that can be configured.
MIN_BITS: Final = 4
ALL_WHOLE: Final = "none of its layers keeps the KV of all tokens"
_NO_GROUP: Final = "its heads have {width} numbers, which neither 64 nor 32 divides"
_LATENT: Final = "its attention keeps a latent vector of each token (MLA), which is small already"
# https://github.com/ggml-org/llama.cpp/issues/21385: the biases of Qwen2's keys are far larger than the keys.
_BIASED: Final = "4 bits spoil the keys of Qwen2, whose biases are large; use kv_bits = 8"


def group_of(width: int) -> int | None:
    """Return the group size for heads of this width; None if no size divides it."""
    return next((group for group in GROUPS if width % group == 0), None)


def group_of_all(widths: Collection[int]) -> int:
    """Return the group size for heads of all these widths. Raises ValueError with the reason if there is none."""
    for width in widths:
        if group_of(width) is None:
            raise ValueError(_NO_GROUP.format(width=width))
    return min(group for width in widths if (group := group_of(width)) is not None)


def number_bits(bits: int, group: int, number_bytes: int) -> float:
    """Return the bits per value, including the value's share of a scale and a bias in the model's own dtype."""
    return bits + 2 * 8 * number_bytes / group


def obstacle(config: dict[str, Any], bits: int) -> str:
    """Return the reason, as a clause, why a model of this configuration cannot have quantized KV; empty if it can."""
    inner = config.get("text_config")
    text = config | inner if isinstance(inner, dict) else config
    if text.get("kv_lora_rank"):
        return _LATENT
    kinds = text.get("layer_types")
    if isinstance(kinds, list) and kinds and "full_attention" not in kinds:
        return ALL_WHOLE
    width = text.get("head_dim")
    if isinstance(width, int) and width > 0 and group_of(width) is None:
        return _NO_GROUP.format(width=width)
    if bits == MIN_BITS and str(text.get("model_type", "")).startswith("qwen2"):
        return _BIASED
    return ""
