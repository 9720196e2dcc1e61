"""Batch modes: which rows a model computes at the same time."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class BatchMode(StrEnum):
    """Batch mode of a model: how its rows share a forward pass."""

    # Prompts of any lengths run together, padded to the longest.
    TOGETHER = "together"
    # Prompts run together in chunks of equal length, without padding; decode runs together.
    EQUAL = "equal"
    # One row runs from its first token to its last, on the model's own caches.
    SINGLE = "single"


# Value of `BatchModePlan.attention` if passes with few tokens per row use mlxd's attention kernels.
KERNEL: Final = "kernel"


@dataclass(frozen=True, slots=True)
class BatchModePlan:
    """Batch mode of a model, and whether the model's prefixes are reused. `reason` explains a mode other than
    `together`, or why prefixes are not reused.

    `attention` is `kernel` if passes with few tokens per row use mlxd's attention kernels; otherwise it is `mlx` with
    the reason.
    """

    mode: BatchMode = BatchMode.TOGETHER
    reuses_prefixes: bool = True
    reason: str = ""
    attention: str = "mlx"


# Results are only deterministic for single rows without prefix reuse: other rows change the shape of a forward pass,
# and cached KV was computed with another shape.
DETERMINISTIC: Final = BatchModePlan(
    BatchMode.SINGLE, False, "requests run one at a time and prefixes are not reused, because deterministic = true"
)
