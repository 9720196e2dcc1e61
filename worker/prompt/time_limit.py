"""Time limit of chat templates: CPython raises an exception in the rendering thread, wherever its code is."""

import ctypes
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Final, TypeVar

from protocol.failures import Code
from worker.errors import RequestInvalid

log = logging.getLogger(__name__)

T = TypeVar("T")

# https://docs.python.org/3/c-api/threads.html#c.PyThreadState_SetAsyncExc
_raise_in_thread: Final = ctypes.pythonapi.PyThreadState_SetAsyncExc
_raise_in_thread.argtypes = (ctypes.c_ulong, ctypes.py_object)
# This null pointer cancels an exception that has not been raised yet.
_NULL: "ctypes.py_object[object]" = ctypes.py_object()


class _TimeLimitExceeded(BaseException):
    """Raised when the limit is exceeded. It is not an `Exception`, which the template's code might catch."""


@dataclass(frozen=True, slots=True, eq=False)
class _LimitedCall:
    """One call of `TimeLimit.run`. The watcher holds the lock while it raises the exception."""

    thread: int
    deadline: float
    lock: threading.Lock = field(default_factory=threading.Lock)


class TimeLimit:
    """Time limit of `limit_s` for renderings in any thread. A Python loop ends at once, a call into C when it returns.

    All renderings have the same limit, so they reach it in the order in which they began. They are not nested.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._begun: SimpleQueue[_LimitedCall] = SimpleQueue()
        self._running: set[_LimitedCall] = set()
        self._starting = threading.Lock()
        self._watcher: threading.Thread | None = None

    def run(self, render: Callable[[], T]) -> T:
        """Return the result of `render`. Raises `RequestInvalid` if it takes too long."""
        self._watch()
        try:
            return self._run(render)
        except _TimeLimitExceeded:
            message = f"the model's chat template took more than {self._limit_s:g} seconds for these messages"
            log.error("%s: their request is refused", message)
            raise RequestInvalid(Code.TEMPLATE_ERROR, message, param="messages") from None

    def _run(self, render: Callable[[], T]) -> T:
        rendering = _LimitedCall(threading.get_ident(), time.monotonic() + self._limit_s)
        self._running.add(rendering)
        self._begun.put(rendering)
        try:
            return render()
        finally:
            # The watcher raises at most one exception per call, and none after it sees this change, so an exception
            # that is raised here belongs to this call.
            self._running.discard(rendering)
            with rendering.lock:
                _raise_in_thread(rendering.thread, _NULL)

    def _watch(self) -> None:
        """Start the watcher at the first call; it never ends."""
        with self._starting:
            if self._watcher is None:
                self._watcher = threading.Thread(target=self._end_late_ones, name="time limit", daemon=True)
                self._watcher.start()

    def _end_late_ones(self) -> None:
        while True:
            rendering = self._begun.get()
            time.sleep(max(0.0, rendering.deadline - time.monotonic()))
            with rendering.lock:
                if rendering in self._running:
                    _raise_in_thread(rendering.thread, _TimeLimitExceeded)


# Time limit of all renderings: a template may loop forever for some messages, and one thread renders all requests of a
# model.
RENDERING: Final = TimeLimit(30.0)
