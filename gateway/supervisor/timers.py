"""Timers and watcher tasks of a worker's state machine: they wait, so that it never has to.

Each reports to the inbox or signals a process; none touches the machine's state.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

from gateway.supervisor import inbox
from gateway.supervisor.ports import Effects, Process
from gateway.supervisor.state import Limits, ModelUnavailable
from protocol.failures import Code, Failure
from protocol.spec import WorkerSpec

log = logging.getLogger(__name__)

GREET_RETRY_S: Final = 0.05


class Timers:
    """Heartbeat, and one alarm at a time, of one worker over all its incarnations."""

    def __init__(self, effects: Effects, limits: Limits, post: Callable[[inbox.Mail], None]) -> None:
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
        _cancel(self._alarm)
        self._alarm = None

    def is_current(self, alarm: inbox.Alarm) -> bool:
        """Whether nothing was armed or disarmed since it rang."""
        return alarm.token == self._alarm_token

    def watchers(self) -> "Watchers":
        """Those of a new incarnation."""
        return Watchers(self._effects, self._limits, self._post, self.run)

    async def _beat(self) -> None:
        while True:
            await self._effects.sleep(self._limits.heartbeat_s)
            self._post(inbox.Beat())

    async def _ring(self, token: int, delay_s: float) -> None:
        await self._effects.sleep(delay_s)
        self._post(inbox.Alarm(token))


class Watchers:
    """Tasks about one incarnation's process: its admission, its greeting, its signals and its exit."""

    def __init__(
        self,
        effects: Effects,
        limits: Limits,
        post: Callable[[inbox.Mail], None],
        run: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._effects = effects
        self._limits = limits
        self._post = post
        self._run = run
        self._admission: asyncio.Task[None] | None = None
        self._greeting: asyncio.Task[None] | None = None
        self._escalation: asyncio.Task[None] | None = None

    def admit(self, spec: WorkerSpec) -> None:
        """Wait for room, then report `Admitted`, or `Denied`."""
        self._admission = self._run(self._admit(spec))

    def watch(self, epoch: int, process: Process) -> None:
        """Report `Exited`."""
        self._run(self._watch(epoch, process))

    def greet(self, try_welcome: Callable[[], bool]) -> None:
        """Send the Welcome, once per incarnation, as soon as the worker is routable."""
        if self._greeting is None:
            self._greeting = self._run(self._greet(try_welcome))

    def escalate(self, process: Process, steps: Sequence[tuple[float, int]]) -> None:
        """Send each signal after its delay, unless the process has exited by then."""
        _cancel(self._escalation)
        self._escalation = self._run(self._escalate(process, steps))

    def cancel_admission(self) -> None:
        _cancel(self._admission)
        self._admission = None

    def finish(self) -> None:
        """The process has exited."""
        _cancel(self._escalation)
        _cancel(self._greeting)
        self._escalation = self._greeting = None

    async def _admit(self, spec: WorkerSpec) -> None:
        try:
            share_bytes = await self._effects.admit(spec)
        except ModelUnavailable as error:
            self._post(inbox.Denied(spec.epoch, error.failure))
        except Exception:  # The root of a task, in a group with all that the daemon does.
            log.exception("worker %s: internal error in its wait for memory", spec.name)
            why = f"model '{spec.name}' is not available: internal error"
            self._post(inbox.Denied(spec.epoch, Failure(Code.INTERNAL, why)))
        else:
            self._post(inbox.Admitted(spec.epoch, share_bytes))

    async def _watch(self, epoch: int, process: Process) -> None:
        status = await process.wait()
        if status is None or status > 0:
            # It left by itself: its Goodbye and its last deltas may still be in the socket.
            await self._effects.sleep(self._limits.goodbye_s)
        self._post(inbox.Exited(epoch, status))

    async def _greet(self, try_welcome: Callable[[], bool]) -> None:
        give_up_at = self._effects.now() + self._limits.greet_s
        while not try_welcome() and self._effects.now() < give_up_at:
            await self._effects.sleep(GREET_RETRY_S)

    async def _escalate(self, process: Process, steps: Sequence[tuple[float, int]]) -> None:
        for delay_s, signum in steps:
            await self._effects.sleep(delay_s)
            process.signal(signum)


def _cancel(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
