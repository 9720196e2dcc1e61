"""Timers of a worker's state machine: its heartbeat, and one alarm at a time. They report to its inbox."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from gateway.workers.supervisor import inbox
from gateway.workers.supervisor.ports import Effects
from gateway.workers.supervisor.state import WorkerLimits


class Timers:
    """Heartbeat and alarm of one worker over all its incarnations. Every task ends with the group of `begin`."""

    def __init__(self, effects: Effects, limits: WorkerLimits, post: Callable[[inbox.InboxMessage], None]) -> None:
        self._effects = effects
        self._limits = limits
        self._post = post
        self._tasks: asyncio.TaskGroup | None = None
        self._alarm: asyncio.Task[None] | None = None
        self._alarm_token = 0

    def begin(self, tasks: asyncio.TaskGroup) -> None:
        """Start the heartbeat. Every timer ends with `tasks`."""
        self._tasks = tasks
        self.run(self._beat())

    def run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        assert self._tasks is not None, "begin() comes first"
        return self._tasks.create_task(work)

    def arm(self, delay_s: float) -> None:
        self.disarm()
        self._alarm = self.run(self._ring(self._alarm_token, delay_s))

    def disarm(self) -> None:
        self._alarm_token += 1
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = None

    def is_current(self, alarm: inbox.AlarmDue) -> bool:
        """Whether nothing was armed or disarmed since it rang."""
        return alarm.token == self._alarm_token

    async def _beat(self) -> None:
        while True:
            await self._effects.sleep(self._limits.heartbeat_s)
            self._post(inbox.HeartbeatDue())

    async def _ring(self, token: int, delay_s: float) -> None:
        await self._effects.sleep(delay_s)
        self._post(inbox.AlarmDue(token))
