"""Pending calls to workers, and the futures that wait for their results."""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager

from protocol.failures import Failure
from protocol.from_worker import Explained, Tokenized

CallResult = asyncio.Future[Tokenized | Explained]


class CallRefused(Exception):
    """Raised when a worker rejected a call, or was lost before it sent the result."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class PendingCalls:
    """Futures of pending calls by request id, each with the epoch of the call's worker. The link owns them."""

    def __init__(self) -> None:
        self._pending: dict[int, tuple[int, CallResult]] = {}

    @contextmanager
    def open(self, epoch: int, rid: int) -> Generator[CallResult, None, None]:
        """Yield the future for the result of a call. The future raises `CallRefused` if the call fails."""
        result: CallResult = asyncio.get_running_loop().create_future()
        self._pending[rid] = (epoch, result)
        try:
            yield result
        finally:
            del self._pending[rid]

    def __contains__(self, rid: int) -> bool:
        return rid in self._pending

    def epoch_of(self, rid: int) -> int | None:
        return self._pending[rid][0] if rid in self._pending else None

    def has_any(self, epoch: int) -> bool:
        """Whether the worker of `epoch` has a pending call."""
        return any(own == epoch for own, _ in self._pending.values())

    def resolve(self, message: Tokenized | Explained) -> None:
        pending = self._pending.get(message.rid)
        if pending is not None and not pending[1].done():
            pending[1].set_result(message)

    def reject(self, rid: int, failure: Failure) -> None:
        pending = self._pending.get(rid)
        if pending is not None and not pending[1].done():
            pending[1].set_exception(CallRefused(failure))

    def reject_all(self, epoch: int, failure: Failure) -> None:
        """Reject all pending calls to a worker that is gone."""
        for rid, (own, _) in self._pending.items():
            if own == epoch:
                self.reject(rid, failure)
