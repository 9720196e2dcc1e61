"""Interfaces between a generation and a dialect. The dialect's encoders turn events into bytes."""

from collections.abc import Sequence
from typing import Protocol

from gateway.errors import ApiError
from protocol.from_worker import Delta


class StreamEncoder(Protocol):
    """Encoder of a request's stream. It never gets deltas that ended in ERROR or ABORT: `error` is called instead."""

    def bind(self, rids: Sequence[int]) -> None:
        """Map request ids to choices. Called before `encode`, and again if the request moves to another worker."""
        ...

    def begin(self, prompt_tokens: int) -> bytes:
        """Return the events before the first delta. `prompt_tokens` is 0 while it is unknown."""
        ...

    def encode(self, deltas: Sequence[Delta]) -> bytes:
        """Return the events of these deltas, possibly none."""
        ...

    def keepalive(self) -> bytes:
        """Return bytes that reset a client's idle timer and have no other effect."""
        ...

    def error(self, error: ApiError) -> bytes | None:
        """Return the last event of a failed stream. None if the dialect has no such event, and the stream must be cut
        off.
        """
        ...

    def end(self) -> bytes:
        """Return the events after the last delta: usage, if requested, and the end mark."""
        ...


class Fold(Protocol):
    """Encoder of a request's whole answer, made from the deltas of which a stream would consist."""

    def bind(self, rids: Sequence[int]) -> None:
        """Map rids to choices."""
        ...

    def add(self, deltas: Sequence[Delta]) -> None:
        """Add these deltas."""
        ...

    def result(self) -> bytes:
        """Return the whole body. Called once, after every choice has finished."""
        ...
