import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from gateway.config.settings import PreventSleep
from gateway.workers.power import LINGER_S, Awake
from tests.support.pool import until
from tests.support.scale import patient

pytestmark = pytest.mark.anyio
DEADLINE_S = 20


class Mac:
    """A machine whose `caffeinate` is a real process that does nothing; the clock is ours."""

    def __init__(self, mode: PreventSleep = "busy") -> None:
        self.mode: PreventSleep = mode
        self.is_busy = False
        self.now = 100.0
        self.holders: list[subprocess.Popen[bytes]] = []
        self.looks = 0
        self.awake = Awake(lambda: self.mode, self.look, start=self.hold, clock=lambda: self.now, poll_s=0.005)

    def look(self) -> bool:
        self.looks += 1
        return self.is_busy

    async def be_looked_at(self) -> None:
        seen = self.looks
        await until(lambda: self.looks > seen + 1)

    def hold(self) -> subprocess.Popen[bytes]:
        self.holders.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
        return self.holders[-1]

    @property
    def held(self) -> int:
        return sum(holder.poll() is None for holder in self.holders)


@asynccontextmanager
async def running(mac: Mac) -> AsyncGenerator[Mac, None]:
    task = asyncio.create_task(mac.awake.run())
    try:
        yield mac
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        for holder in mac.holders:
            holder.wait(patient(DEADLINE_S))
            assert holder.stdin is not None
            holder.stdin.close()


async def test_an_idle_machine_may_sleep_and_a_busy_one_not_until_it_was_idle_for_a_while() -> None:
    async with running(Mac()) as mac:
        mac.is_busy = True
        await until(lambda: mac.held == 1)

        mac.is_busy = False
        mac.now += LINGER_S - 1
        mac.is_busy = True
        await mac.be_looked_at()
        mac.is_busy = False
        mac.now += LINGER_S - 1
        await mac.be_looked_at()
        assert (mac.held, len(mac.holders)) == (1, 1)

        mac.now += 2
        await until(lambda: mac.held == 0)
        assert not mac.awake.is_held


async def test_always_and_never_do_not_ask_whether_there_is_work_and_can_be_changed_at_any_time() -> None:
    async with running(Mac("always")) as mac:
        await until(lambda: mac.held == 1)
        mac.mode, mac.is_busy = "never", True
        await until(lambda: mac.held == 0)
        mac.mode = "busy"
        await until(lambda: mac.held == 1)


async def test_a_holder_that_is_killed_is_replaced() -> None:
    async with running(Mac("always")) as mac:
        await until(lambda: mac.held == 1)
        mac.holders[0].kill()
        await until(lambda: len(mac.holders) == 2 and mac.held == 1)


async def test_nothing_is_held_once_it_ends() -> None:
    async with running(Mac("always")) as mac:
        await until(lambda: mac.held == 1)
    assert mac.held == 0


async def test_a_machine_without_caffeinate_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    def missing() -> subprocess.Popen[bytes]:
        raise FileNotFoundError(2, "No such file or directory")

    await asyncio.wait_for(Awake(lambda: "always", lambda: False, start=missing).run(), patient(DEADLINE_S))

    assert [record.message for record in caplog.records] == [
        "the machine may sleep during requests: no caffeinate (No such file or directory)"
    ]
