"""Heads for multi-token prediction in checkpoints: whether there is one, and whether the worker runs it.

The gateway reports it before a load, the worker during one.
"""

import re
from typing import Final

# Architectures whose heads are supported, in the published forms of their checkpoints.
SUPPORTED_TYPES: Final = frozenset(
    {
        "bailing_moe", "deepseek_v3", "deepseek_v32", "ernie4_5_moe", "exaone_moe", "glm4_moe", "glm4_moe_lite",
        "glm_moe_dsa", "longcat_flash", "mimo", "mimo_v2_flash", "qwen3_5", "qwen3_5_moe", "qwen3_next", "step3p5",
    }
)  # fmt: skip
# Patterns in the names of their tensors; a head layer after the model's last has a projection of two states.
_NAMES: Final = re.compile(r"(^|\.)(mtp|nextn)[._]|\.eh_proj\.")


def is_head(name: str) -> bool:
    """Whether a tensor of a checkpoint belongs to a head."""
    return _NAMES.search(name) is not None


def unused(model_type: str) -> str:
    """Return the reason why the head of a checkpoint is not used; empty if it is."""
    return "" if model_type in SUPPORTED_TYPES else f"its head is there and not used: those of {model_type} are not run"
