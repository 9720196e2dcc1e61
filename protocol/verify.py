"""Lines that `python -m worker.tools.verify` prints, one JSON object each, for `mlxctl verify` to show."""

import msgspec


class Difference(msgspec.Struct, frozen=True):
    """The first position where an output is not what it was alone.

    `margin` is how much likelier the likeliest token was there than the next one, in nats: what floating point rounds
    away on a GPU is a margin near 0.
    """

    request: int
    position: int
    margin: float | None = None


class VerifyCheck(msgspec.Struct, frozen=True):
    """One way of running the same requests. `note` says why it was left out, or proves nothing."""

    name: str
    requests: int = 0
    tokens: int = 0
    # Prompt tokens that came from a cache.
    cached: int = 0
    differences: tuple[Difference, ...] = ()
    note: str = ""
    is_skipped: bool = False
    # The largest difference of a token's log-probability where the tokens are equal, in nats.
    drift: float = 0.0

    @property
    def is_good(self) -> bool:
        return not self.differences and (self.is_skipped or not self.note)
