"""Wait for the exit of any process, child or not (pidfd, kqueue, polling)."""

import asyncio
import os
import select
import sys
from collections.abc import Callable
from typing import Final

POLL_S: Final = 0.05


async def wait_exit(pid: int, is_gone: Callable[[], bool]) -> None:
    """Wait for the exit of process `pid`. The system reports it within milliseconds; where it cannot, `is_gone` is
    polled."""
    fd = _exit_fd(pid)
    if fd is None:
        while not is_gone():  # noqa: ASYNC110 - this system has no exit event
            await asyncio.sleep(POLL_S)
        return
    loop = asyncio.get_running_loop()
    exited = asyncio.Event()
    try:
        # The pid may have been reused before the descriptor was opened.
        if not is_gone():
            loop.add_reader(fd, exited.set)
            await exited.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)


def _exit_fd(pid: int) -> int | None:
    """Open a descriptor that becomes readable when `pid` exits; None if that is impossible."""
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
        # The kqueue object would close its descriptor when it is garbage-collected.
        try:
            return os.dup(queue.fileno())
        finally:
            queue.close()
