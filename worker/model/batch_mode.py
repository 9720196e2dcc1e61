"""Lanes: how many rows a model computes at a time, and which."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class BatchMode(StrEnum):
    """Lane of a model: how its rows share a forward pass."""

    # Prompts of any lengths together, padded to the longest.
    TOGETHER = "together"
    # Prompts together by chunks of equal length, so that nothing is padded; decode together.
    EQUAL = "equal"
    # One row from its first token to its last, on the model's own caches.
    SINGLE = "single"


# Attention of few tokens a row by kernels of ours.
KERNEL: Final = "kernel"


@dataclass(frozen=True, slots=True)
class BatchModePlan:
    """The lane of a model, whether its prefixes can be reused, and why not the first lane or no reuse.

    `attention` is `kernel` where attention of few tokens a row goes by our kernels, else `mlx`, with the reason.
    """

    lane: BatchMode = BatchMode.TOGETHER
    reuses_prefixes: bool = True
    reason: str = ""
    attention: str = "mlx"


# Whatever else runs and ran: other rows change the shape of a forward pass, and cached KV was computed in another one.
DETERMINISTIC: Final = BatchModePlan(
    BatchMode.SINGLE, False, "requests run one at a time and prefixes are not reused, because deterministic = true"
)
