"""Threads that do blocking calls one after the other. A simulation has its own, which use a virtual clock."""

from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor

# Makes an executor, with a name, that runs its calls in order.
MakeThread = Callable[[str], Executor]


def single_thread(name: str) -> Executor:
    return ThreadPoolExecutor(1, name)
