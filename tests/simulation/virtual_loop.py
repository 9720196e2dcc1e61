"""Event loop with a virtual clock, whose order of ready callbacks is drawn from a seed."""

import asyncio
import contextvars
import heapq
import itertools
from collections.abc import Callable
from random import Random
from typing import Any, Final

# A story has some thousands of turns. One that goes round without progress of its time is an error.
TURNS_MAX: Final = 100_000


class Stalled(Exception):
    """Nothing can ever happen again, or the same happens without an end."""


class NumberedTask(asyncio.Task[Any]):
    """Task whose hash is the number of tasks and futures that were hashed before it.

    Sets of tasks are ordered by hash, and the default hash is an address, which differs in each run.
    """

    number = 0

    def __hash__(self) -> int:
        self.number = self.number or _next_number(self)
        return self.number


class NumberedFuture(asyncio.Future[Any]):
    """Future whose hash is the number of tasks and futures that were hashed before it."""

    number = 0

    def __hash__(self) -> int:
        self.number = self.number or _next_number(self)
        return self.number


class ScheduledCall(asyncio.TimerHandle):
    """Callback that is ready or waits for its time. Without asyncio's debug mode, which each handle asks for twice."""

    __slots__ = ()

    def __init__(  # pyright: ignore[reportMissingSuperCall]
        self,
        when: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        loop: "VirtualLoop",
        context: contextvars.Context | None,
    ) -> None:
        self._when = when
        self._callback = callback
        self._args = args
        self._loop = loop
        self._context = contextvars.copy_context() if context is None else context
        self._cancelled = False
        self._repr = self._source_traceback = None

    def cancel(self) -> None:
        self._cancelled = True
        # What the callback refers to is freed, as in asyncio.
        self._callback, self._args = _nothing, ()


def _nothing() -> None:
    pass


def _next_number(future: asyncio.Future[Any]) -> int:
    loop = future.get_loop()
    assert isinstance(loop, VirtualLoop)
    return next(loop.numbers)


class VirtualLoop(asyncio.BaseEventLoop):
    """Loop whose time advances only when nothing is ready. Calls in threads run inline, at a later turn.

    `on_turn` is called after each turn. With `is_shuffled`, callbacks that are ready together run in an order drawn
    from the seed; else in their own order, as in asyncio's loops. It has no files, and no other thread wakes it.
    """

    def __init__(self, seed: int, *, is_shuffled: bool) -> None:
        super().__init__()
        self._now = 0.0
        self.numbers = itertools.count(1)
        self._random = Random(seed ^ 0x5EED)
        self._is_shuffled = is_shuffled
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timer_numbers = itertools.count()
        self.turns = 0
        self.on_turn: Callable[[], None] = lambda: None

    def time(self) -> float:
        return self._now

    def jump(self, seconds: float) -> None:
        """Advance the clock although callbacks are ready: the machine slept, or another program had the processor."""
        self._now += seconds

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        call = ScheduledCall(self._now, callback, args, self, context)
        self._ready.append(call)  # type: ignore[attr-defined]  # BaseEventLoop's queue of ready callbacks
        return call

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        call = ScheduledCall(when, callback, args, self, context)
        # Numbers compare faster than handles, and keep the order of timers of one time.
        heapq.heappush(self._timers, (when, next(self._timer_numbers), call))
        return call

    def _run_once(self) -> None:
        """Run the callbacks that are ready, in place of BaseEventLoop's method, which also polls files."""
        ready, timers = self._ready, self._timers  # type: ignore[attr-defined]  # BaseEventLoop's queue
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        self.turns += 1
        if self.turns > TURNS_MAX:
            raise Stalled(f"no end after {self.turns} turns, at {self._now:.3f} s")
        self.on_turn()
        if ready or (timers and timers[0][0] <= self._now):
            self._now += 1e-7
        elif timers:
            # A timer must be due after this wait, in spite of rounding.
            self._now = timers[0][0] + 1e-9
        else:
            raise Stalled(f"at {self._now:.3f} s nothing is ready and no timer is set")
        while timers and timers[0][0] <= self._now:
            ready.append(heapq.heappop(timers)[2])
        calls = list(ready)
        ready.clear()
        if self._is_shuffled and len(calls) > 1:
            self._random.shuffle(calls)
        for call in calls:
            # One of these calls may have cancelled another.
            if not call._cancelled:
                try:
                    call._context.run(call._callback, *call._args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:  # as Handle._run
                    self.call_exception_handler({"message": f"exception in {call}", "exception": error})

    def _write_to_self(self) -> None:
        pass

    def get_debug(self) -> bool:
        return False

    def create_task(
        self, coro: Any, *, name: object = None, context: contextvars.Context | None = None
    ) -> asyncio.Task[Any]:
        return NumberedTask(coro, loop=self, name=None if name is None else str(name), context=context)

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
