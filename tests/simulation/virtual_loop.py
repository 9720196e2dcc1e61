"""Event loop with a virtual clock, whose order of ready callbacks is drawn from a seed."""

import asyncio
import contextvars
import itertools
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any, Final

# A story has some thousands of turns. One that goes round without progress of its time is an error.
TURNS_MAX: Final = 100_000


class Stalled(Exception):
    """Nothing can ever happen again, or the same happens without an end."""


class NumberedTask(asyncio.Task[Any]):
    """Task with a hash by its order of creation.

    Sets of tasks are ordered by hash, and the default hash is an address, which differs in each run.
    """

    def __init__(self, coro: Coroutine[Any, Any, Any], *, loop: "VirtualLoop", **kwargs: Any) -> None:
        self.number = next(loop.numbers)
        super().__init__(coro, loop=loop, **kwargs)

    def __hash__(self) -> int:
        return self.number


class NumberedFuture(asyncio.Future[Any]):
    """Future with a hash by its order of creation."""

    def __init__(self, *, loop: "VirtualLoop") -> None:
        self.number = next(loop.numbers)
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self.number


class _NoSelector:
    """Selector without files: a wait advances the clock instead."""

    def __init__(self, loop: "VirtualLoop") -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        self._loop.wait(timeout)
        return []


class VirtualLoop(asyncio.BaseEventLoop):
    """Loop whose time advances only when nothing is ready. Calls in threads run inline, at a later turn.

    `on_turn` is called after each turn. With `is_shuffled`, callbacks that are ready together run in an order drawn
    from the seed; else in their own order, as in asyncio's loops.
    """

    def __init__(self, seed: int, *, is_shuffled: bool) -> None:
        super().__init__()
        self._now = 0.0
        self.numbers = itertools.count(1)
        self._random = Random(seed ^ 0x5EED)
        self._is_shuffled = is_shuffled
        self._selector = _NoSelector(self)
        self.turns = 0
        self.on_turn: Callable[[], None] = lambda: None
        self.set_task_factory(_make_task)  # type: ignore[arg-type]  # only coroutines become tasks here

    def time(self) -> float:
        return self._now

    def jump(self, seconds: float) -> None:
        """Advance the clock although callbacks are ready: the machine slept, or another program had the processor."""
        self._now += seconds

    def wait(self, timeout: float | None) -> None:
        self.turns += 1
        if self.turns > TURNS_MAX:
            raise Stalled(f"no end after {self.turns} turns, at {self._now:.3f} s")
        self.on_turn()
        if timeout is None:
            raise Stalled(f"at {self._now:.3f} s nothing is ready and no timer is set")
        # A timer must be due after this wait, in spite of rounding.
        self._now += timeout + 1e-9 if timeout > 0 else 1e-7

    def _process_events(self, event_list: list[Any]) -> None:
        ready = self._ready  # type: ignore[attr-defined]  # BaseEventLoop has no interface for the order
        if self._is_shuffled and len(ready) > 1:
            handles = list(ready)
            self._random.shuffle(handles)
            ready.clear()
            ready.extend(handles)

    def _write_to_self(self) -> None:
        pass

    def create_future(self) -> asyncio.Future[Any]:
        return NumberedFuture(loop=self)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Call `func` up to ten milliseconds later, in this thread."""
        future = self.create_future()
        self.call_later(self._random.random() * 0.01, _call, future, func, args)
        return future


def _call(future: asyncio.Future[Any], func: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        result = func(*args)
    except Exception as error:
        if not future.cancelled():
            future.set_exception(error)
    else:
        if not future.cancelled():
            future.set_result(result)


def _make_task(
    loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, Any], context: contextvars.Context | None = None
) -> asyncio.Task[Any]:
    assert isinstance(loop, VirtualLoop)
    return NumberedTask(coro, loop=loop, context=context)
