"""Measured time of a forward pass, from which the pacer learns."""

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class PassTime:
    """Duration of a forward pass with `width` tokens of each of `rows` generating rows, and `prompted` prompt tokens.

    The rows together got `tokens` tokens from the pass. A pass with both rows and prompts is a fused pass, and
    `seconds` is its whole time. `is_reading` is set if the prompt tokens were read by a draft model.
    """

    seconds: float
    rows: int = 0
    width: int = 1
    tokens: int = 0
    prompted: int = 0
    is_reading: bool = False
