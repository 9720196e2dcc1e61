"""Tasks that outlive the request that started them. They end with the daemon."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

log = logging.getLogger(__name__)


class TaskSet:
    """Tasks without a request. A failed task is logged and counted."""

    def __init__(self, on_failure: Callable[[], None]) -> None:
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run `work` as a task. `finish` cancels it if it has not ended."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def finish(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for the tasks, then cancel the rest. No task may be started after this."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)
        for task in (left := list(self._tasks)):
            task.cancel()
        if left:
            await asyncio.wait(left)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._on_failure()
            log.error("%s failed", task.get_name(), exc_info=error)
