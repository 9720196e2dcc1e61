"""Ranks of a group: processes that run one model together, started with one worker and ended with it."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from msgspec.structs import replace

from gateway.workers.supervisor.ports import WorkerPort
from protocol.curve import make_pair
from protocol.failures import FINAL_EXITS, ExitStatus
from protocol.spec import GroupSpec, RankSpec, WorkerSpec

# Name of this machine among a group's nodes.
LOCAL: Final = "local"
# From the end of rank 0 to SIGTERM and to SIGKILL: ranks that see its end leave by themselves.
LEAVE_S: Final = 0.5
TERM_S: Final = 1.0
# From the end of a follower to the end of rank 0, which has heard of it as well.
NOTICE_S: Final = 2.0
_FAULTS: Final = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGABRT, signal.SIGFPE})


@dataclass(frozen=True, slots=True)
class RankPlace:
    """A node as a group uses it. `host` is the address of this machine that the node reaches; `ip` is where a rank
    listens there, `devices` are its RDMA devices by rank."""

    host: str = "127.0.0.1"
    ip: str = "127.0.0.1"
    devices: tuple[str, ...] = ()


class RankStarter(Protocol):
    """Start of ranks on one node: here, or by the agent of another machine."""

    def place(self, nodes: Sequence[str]) -> RankPlace:
        """The place of this node in a group over `nodes`, by rank."""
        ...

    def start(self, spec: WorkerSpec) -> WorkerPort:
        """Start a rank. Returns at once: where it cannot be started, that is how the process ends. Raises `OSError`."""
        ...


def is_local(group: GroupSpec) -> bool:
    """Whether all ranks are of this machine."""
    return all(node == LOCAL for node in group.nodes)


def ranks_of(spec: WorkerSpec, places: Mapping[str, RankPlace] | None = None) -> list[WorkerSpec]:
    """The specifications of all ranks of one start: with new keys, and ports that were free a moment ago.

    Raises `OSError`.
    """
    assert spec.group is not None
    nodes, places = spec.group.nodes, {LOCAL: RankPlace(), **(places or {})}
    if is_local(spec.group):
        places[LOCAL] = RankPlace()
    keys = [make_pair() for _ in nodes]
    # Ranks on other machines come by the address that they know this one by.
    host = next((places[node].host for node in nodes if node != LOCAL), places[LOCAL].host)
    plan, watch = _free_addresses(host)
    specs: list[WorkerSpec] = []
    for rank, (node, pair) in enumerate(zip(nodes, keys, strict=True)):
        own = RankSpec(
            rank=rank,
            plan=plan,
            watch=watch,
            server=keys[0].public,
            public=pair.public,
            secret=pair.secret,
            members=tuple(each.public for each in keys[1:]) if rank == 0 else (),
            ip=places[node].ip,
            devices=places[node].devices,
            beside=nodes.count(node),
        )
        specs.append(replace(spec, rank=own))
    return specs


def _free_addresses(host: str) -> tuple[str, str]:
    """Two addresses on one host; both ports are held until both are known."""
    with socket.socket() as one, socket.socket() as other:
        for each in (one, other):
            each.bind((host, 0))
        plan, watch = (f"tcp://{host}:{each.getsockname()[1]}" for each in (one, other))
        return plan, watch


class RankGroup:
    """The processes of a group as one: that of rank 0, which is the worker's, and those of its followers.

    Rank 0 hears of a lost follower by itself. Its end is the end of all of them: none is left when `wait` returns.
    """

    def __init__(self, lead: WorkerPort, followers: Sequence[WorkerPort], here: Sequence[int]) -> None:
        """`here` are the pids of the followers on this machine."""
        self.pids = (lead.pid, *here)
        self._lead = lead
        self._followers = list(followers)
        self._is_killed = False

    @property
    def pid(self) -> int:
        return self._lead.pid

    @property
    def is_adopted(self) -> bool:
        return self._lead.is_adopted

    async def wait(self) -> int | None:
        async with asyncio.TaskGroup() as tasks:
            lead = tasks.create_task(self._lead.wait())
            followers = [tasks.create_task(follower.wait()) for follower in self._followers]
            await asyncio.wait([lead, *followers], return_when=asyncio.FIRST_COMPLETED)
            is_first = not lead.done() and not self._is_killed
            lost = [task.result() for task in followers if task.done()] if is_first else []
            if lost and await self._end([self._lead], [lead], (NOTICE_S, signal.SIGTERM), (TERM_S, signal.SIGKILL)):
                # A clean stop is one in whatever order the ranks end.
                lost = [] if lead.result() == ExitStatus.OK else lost
            await asyncio.wait([lead])
            await self._end(self._followers, followers, (LEAVE_S, signal.SIGTERM), (TERM_S, signal.SIGKILL))
        return _verdict(lead.result(), lost)

    async def _end(
        self,
        processes: Sequence[WorkerPort],
        waits: "Sequence[asyncio.Task[int | None]]",
        *steps: tuple[float, signal.Signals],
    ) -> bool:
        """Send each signal after its delay to those that have not ended by then; whether all had ended before any."""
        for step, (delay_s, signum) in enumerate(steps):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await asyncio.wait(waits)
                    return step == 0
            for process, wait in zip(processes, waits, strict=True):
                if not wait.done():
                    process.signal(signum)
        await asyncio.wait(waits)
        return False

    def signal(self, signum: int) -> None:
        self._lead.signal(signum)
        if signum == signal.SIGKILL:
            self._is_killed = True
            for follower in self._followers:
                follower.signal(signum)

    def last_lines(self) -> list[str]:
        others = [
            f"rank {rank}: {line}"
            for rank, follower in enumerate(self._followers, 1)
            for line in follower.last_lines()[-10:]
        ]
        return [*others, *self._lead.last_lines()]

    def close(self) -> None:
        for process in (*self._followers, self._lead):
            process.close()


def _verdict(status: int | None, lost: Sequence[int | None]) -> int | None:
    """Exit status of a group, of which followers that ended before rank 0 did may be the cause."""
    if not lost:
        # Native code that lost a partner ends its process with 1, and so does the guard of a rank that is stuck in it.
        return ExitStatus.PARTNER_LOST if status == 1 else status
    final = next((each for each in lost if each in FINAL_EXITS), None)
    if final is not None:
        return final
    fault = next((each for each in lost if each is not None and -each in _FAULTS), None)
    # Faults in native code may come from a request: they count as those of a worker do.
    return ExitStatus.PARTNER_LOST if fault is None else fault
