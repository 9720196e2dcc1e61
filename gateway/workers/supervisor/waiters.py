"""Futures that wait for a worker: each is woken exactly once, with a result or a reason."""

import asyncio
from collections.abc import Callable

Waiter = asyncio.Future[None]


class Waiters:
    """Futures of one kind. Those whose owner has left are ignored."""

    def __init__(self) -> None:
        self._futures: list[Waiter] = []

    def add(self, waiter: Waiter) -> None:
        self._futures.append(waiter)

    def has_any(self) -> bool:
        return any(not future.done() for future in self._futures)

    def wake(self) -> None:
        """Give each its result."""
        for future in self._take():
            future.set_result(None)

    def refuse(self, reason: Callable[[], Exception]) -> None:
        """Give each an exception of its own: one raised in several tasks gathers their frames."""
        for future in self._take():
            future.set_exception(reason())

    def _take(self) -> list[Waiter]:
        futures, self._futures = self._futures, []
        return [future for future in futures if not future.done()]
