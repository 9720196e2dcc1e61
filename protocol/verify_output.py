"""Output of `python -m worker.tools.verify`, one JSON object a line, for `mlxctl verify` to show."""

import msgspec


class Difference(msgspec.Struct, frozen=True):
    """First position where an output differs from the output of the request run alone.

    `margin` is the log-probability of the best token there minus the second best's, in nats: rounding on a GPU only
    explains a margin near 0.
    """

    request: int
    position: int
    margin: float | None = None


class VerifyCheck(msgspec.Struct, frozen=True):
    """Result of one check, which runs the same requests in one way, or measures a number. `note` explains why it was
    skipped, or why it proves nothing."""

    name: str
    requests: int = 0
    tokens: int = 0
    # Number of prompt tokens that came from a cache, in all outputs of the check.
    cached: int = 0
    differences: tuple[Difference, ...] = ()
    note: str = ""
    is_skipped: bool = False
    # Largest difference of a token's log-probability between equal tokens, in nats.
    drift: float = 0.0
    # Numbers for people, such as a perplexity.
    measured: str = ""
    # Whether a measured number is not what it should be.
    is_wrong: bool = False

    @property
    def is_good(self) -> bool:
        return not self.differences and not self.is_wrong and (self.is_skipped or not self.note)
