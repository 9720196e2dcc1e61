"""Threads that compute with MLX in a process of tests."""

import threading
import time
from pathlib import Path

from tests.support.scale import patient


def join(thread: threading.Thread, timeout_s: float = 60.0) -> None:
    """Wait until a thread has ended for the operating system too; `timeout_s` is of a quiet machine.

    Until Python 3.13 `Thread.join` returns when the thread has left Python. MLX then destroys the thread's compiled
    functions, for which it needs the GIL: if the interpreter ends in that moment, the process ends with "terminate
    called without an active exception". A worker leaves with `os._exit` and so never meets it.
    """
    deadline = time.monotonic() + patient(timeout_s)
    thread.join(patient(timeout_s))
    assert not thread.is_alive()
    # A system without /proc has no such list of threads, and there the last moment is not waited for.
    task = Path(f"/proc/self/task/{thread.native_id}")
    while task.exists():
        assert time.monotonic() < deadline, f"thread {thread.name} has left Python but not ended"
        time.sleep(0.001)
