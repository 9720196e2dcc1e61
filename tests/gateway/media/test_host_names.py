"""Lookups of names whose servers do not answer: what they hold up, and what they do not."""

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from threading import Event

import pytest

from gateway.errors import Unavailable
from gateway.media.host_names import LOOKUPS_MAX, LOOKUPS_OF_KEY_MAX, UNANSWERED_S, HostNames, look_up
from gateway.media.media_reference import FetchFailed
from tests.gateway.harness import until
from tests.support.scale import patient

pytestmark = pytest.mark.anyio
NEVER_S = 3600.0


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@dataclass(slots=True)
class Dns:
    """A resolver: names that begin with `slow` have no answer before `may_end`, those with `no` none at all."""

    may_end: Event = field(default_factory=Event)
    asked: list[str] = field(default_factory=list[str])

    def look_up(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        if host.startswith("slow"):
            self.may_end.wait(patient(60))
        if host.startswith("no"):
            raise socket.gaierror("no such name")
        return [f"192.0.2.{port}"]


@asynccontextmanager
async def resolver() -> AsyncGenerator[Dns]:
    dns = Dns()
    try:
        yield dns
    finally:
        dns.may_end.set()


async def test_names_are_resolved_by_the_system() -> None:
    assert "127.0.0.1" in look_up("localhost", 80)
    assert "127.0.0.1" in await HostNames().resolve("", "localhost", 80)


async def test_the_error_of_a_lookup_is_its_requests() -> None:
    async with resolver() as dns:
        with pytest.raises(socket.gaierror):
            await HostNames(dns.look_up).resolve("", "no.test", 80)


async def test_names_without_an_answer_hold_up_their_key_alone() -> None:
    async with resolver() as dns:
        names = HostNames(dns.look_up, NEVER_S)
        slow = [asyncio.ensure_future(names.resolve("one", f"slow{at}.test", 1)) for at in range(8)]
        await until(lambda: len(dns.asked) == LOOKUPS_OF_KEY_MAX)
        assert await names.resolve("other", "good.test", 2) == ["192.0.2.2"]
        assert len(dns.asked) == LOOKUPS_OF_KEY_MAX + 1
        # A request that ends does not end its lookups, which hold their places.
        for each in slow:
            each.cancel()
        await asyncio.wait(slow)
        later = asyncio.ensure_future(names.resolve("one", "good.test", 3))
        assert await names.resolve("other", "good.test", 2) == ["192.0.2.2"]
        assert not later.done()
        dns.may_end.set()
        assert await later == ["192.0.2.3"]


async def test_lookups_beyond_the_bound_of_all_keys_are_refused_at_once() -> None:
    async with resolver() as dns:
        names = HostNames(dns.look_up, NEVER_S)
        slow = [asyncio.ensure_future(names.resolve(str(at // 2), f"slow{at}", 1)) for at in range(LOOKUPS_MAX)]
        await until(lambda: len(dns.asked) == LOOKUPS_MAX)
        for _ in range(3):
            with pytest.raises(Unavailable, match="being looked up"):
                await names.resolve("other", "good.test", 2)
        dns.may_end.set()
        await asyncio.gather(*slow)
        assert await names.resolve("other", "good.test", 2) == ["192.0.2.2"]


async def test_a_name_without_an_answer_is_refused_for_a_minute_and_holds_its_place() -> None:
    now = [1000.0]
    async with resolver() as dns:
        names = HostNames(dns.look_up, 0.05, lambda: now[0])
        for name in "slow.test", "Slow.Test":
            with pytest.raises(FetchFailed, match="was not resolved"):
                await names.resolve("one", name, 1)
        assert dns.asked == ["slow.test"]
        with pytest.raises(FetchFailed):
            await names.resolve("one", "slow2.test", 1)
        # The key's places are held by lookups that were given up.
        with pytest.raises(Unavailable, match="this key's media"):
            await names.resolve("one", "good.test", 1)
        assert dns.asked == ["slow.test", "slow2.test"]
        dns.may_end.set()
        now[0] += UNANSWERED_S
        async with asyncio.timeout(patient(10)):
            while len(dns.asked) == 2:
                with suppress(FetchFailed, Unavailable):
                    await names.resolve("one", "slow.test", 1)


# The end of the daemon's loop, and of its process.
ENDING = """
import asyncio, threading, uvloop
from gateway.media.host_names import HostNames
from gateway.media.media_reference import FetchFailed

async def main():
    names = HostNames(lambda host, port: threading.Event().wait(), 0.01)
    try:
        await names.resolve("", "slow.test", 80)
    except FetchFailed:
        print("given up")

with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(main())
"""


async def test_the_end_of_the_process_waits_for_no_lookup() -> None:
    ended = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-P", "-c", ENDING], capture_output=True, text=True, timeout=patient(30)
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "given up\n", "")
