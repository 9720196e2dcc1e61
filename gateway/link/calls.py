"""Pending questions to workers about tokens, and the futures that wait for their answers."""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager

from protocol.failures import Failure
from protocol.from_worker import Tokenized

Answer = asyncio.Future[Tokenized]


class CallRefused(Exception):
    """A worker's answer to a question was no."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class PendingCalls:
    """Open questions by their rid, with the epoch of the worker. Owned by the link."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[int, Answer]] = {}

    @contextmanager
    def asking(self, epoch: int, rid: int) -> Generator[Answer, None, None]:
        """The answer to come; it raises `CallRefused`. The question is forgotten at the end."""
        answer: Answer = asyncio.get_running_loop().create_future()
        self._open[rid] = (epoch, answer)
        try:
            yield answer
        finally:
            del self._open[rid]

    def __contains__(self, rid: int) -> bool:
        return rid in self._open

    def is_asked(self, epoch: int, rid: int) -> bool:
        """Whether this question was put to the worker of `epoch`."""
        return rid in self._open and self._open[rid][0] == epoch

    def are_open(self, epoch: int) -> bool:
        """Whether this worker was asked something that it has not answered."""
        return any(asked == epoch for asked, _ in self._open.values())

    def answered(self, message: Tokenized) -> None:
        pending = self._open.get(message.rid)
        if pending is not None and not pending[1].done():
            pending[1].set_result(message)

    def refused(self, rid: int, failure: Failure) -> None:
        pending = self._open.get(rid)
        if pending is not None and not pending[1].done():
            pending[1].set_exception(CallRefused(failure))

    def lost(self, epoch: int, failure: Failure) -> None:
        """This worker is gone."""
        for rid, (asked, _) in self._open.items():
            if asked == epoch:
                self.refused(rid, failure)
