"""The seam between a generation and a dialect: events in, bytes of that dialect out."""

from collections.abc import Sequence
from typing import Protocol

from gateway.errors import ApiError
from protocol.messages import Delta


class StreamEncoder(Protocol):
    """Events of a request's stream. Never sees a delta that ended in ERROR or ABORT: those come as `error`."""

    def bind(self, rids: Sequence[int]) -> None:
        """Map rids to choices. Called before `encode`, again when a request moves to another worker."""
        ...

    def begin(self, prompt_tokens: int) -> bytes:
        """Events before the first delta. `prompt_tokens` is 0 while it is not known."""
        ...

    def encode(self, deltas: Sequence[Delta]) -> bytes:
        """The events of these deltas, possibly none."""
        ...

    def keepalive(self) -> bytes:
        """Something that resets an idle timer and means nothing."""
        ...

    def error(self, error: ApiError) -> bytes | None:
        """The last event of a stream that failed; None where it has no place for one, and must be cut off."""
        ...

    def end(self) -> bytes:
        """Events after the last delta: usage, if requested, and the end mark."""
        ...


class Fold(Protocol):
    """The same events as one answer."""

    def bind(self, rids: Sequence[int]) -> None:
        """Map rids to choices."""
        ...

    def add(self, deltas: Sequence[Delta]) -> None:
        """Take these deltas in."""
        ...

    def result(self) -> bytes:
        """The whole body. Called once, after every choice has finished."""
        ...
