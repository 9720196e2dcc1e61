"""Exit watch of a process that need not be our child (pidfd, kqueue, polling)."""

import asyncio
import os
import select
import sys
from collections.abc import Callable
from typing import Final

POLL_S: Final = 0.05


async def wait_exit(pid: int, is_gone: Callable[[], bool]) -> None:
    """Return within milliseconds of the exit; where the system has no such event, `is_gone` is asked every 50 ms."""
    fd = _exit_fd(pid)
    if fd is None:
        while not is_gone():  # noqa: ASYNC110 - nothing else can tell
            await asyncio.sleep(POLL_S)
        return
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    try:
        # Asked once more: the pid may have changed hands before the descriptor was made.
        if not is_gone():
            loop.add_reader(fd, over.set)
            await over.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)


def _exit_fd(pid: int) -> int | None:
    """A descriptor that becomes readable when `pid` exits, or None."""
    if sys.platform == "linux":
        try:
            return os.pidfd_open(pid)
        except OSError:
            return None
    if sys.platform == "darwin":
        return _kqueue_fd(pid)
    return None


if sys.platform == "darwin":

    def _kqueue_fd(pid: int) -> int | None:
        queue = select.kqueue()
        exit_event = select.kevent(pid, select.KQ_FILTER_PROC, select.KQ_EV_ADD, select.KQ_NOTE_EXIT)
        try:
            queue.control([exit_event], 0)
        except OSError:
            queue.close()
            return None
        # The queue object closes its descriptor when collected: hand out one of our own.
        try:
            return os.dup(queue.fileno())
        finally:
            queue.close()
