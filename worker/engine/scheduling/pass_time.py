"""Time of a forward pass, as the engine measures it and the pacer learns from it."""

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class PassTime:
    """Seconds of a forward pass of `width` tokens of each of `rows` that generate, and of `prompted` of prompts.

    The rows have got `tokens` out of it. With rows and prompts it was a fused pass, and waited for as a whole.
    `is_reading`: a draft model has read these tokens of prompts.
    """

    seconds: float
    rows: int = 0
    width: int = 1
    tokens: int = 0
    prompted: int = 0
    is_reading: bool = False
