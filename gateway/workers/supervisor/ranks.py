"""Ranks of a group: processes that run one model together, as one worker."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from gateway.workers.supervisor.ports import WorkerPort
from protocol.failures import FINAL_EXITS, ExitStatus, Failure
from protocol.sharding import parts_of
from protocol.sockets import make_pair
from protocol.spec import LOCAL, GroupSpec, HostSpec, RankSpec, WorkerSpec

_THIS_HOST: Final = HostSpec("", ("127.0.0.1",))
# Followers have this long to exit after rank 0. Then they get SIGTERM, and SIGKILL after TERM_S more.
FOLLOWER_GRACE_S: Final = 0.5
TERM_S: Final = 1.0
# Rank 0 has this long to exit after a follower. Then it gets SIGTERM.
LEAD_GRACE_S: Final = 2.0
_FAULTS: Final = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGABRT, signal.SIGFPE})


def is_local(group: GroupSpec) -> bool:
    """Whether all ranks run on this machine."""
    return all(node == LOCAL for node in group.nodes)


def ranks_of(spec: WorkerSpec) -> list[WorkerSpec]:
    """Return the specifications of all ranks, with new keys and free ports. Raises `OSError`."""
    assert spec.group is not None
    group, nodes = spec.group, spec.group.nodes
    hosts = group.hosts or (_THIS_HOST,) * group.size
    keys = [make_pair() for _ in nodes]
    plan, watch = _free_addresses(hosts[0].ips[0])
    specs: list[WorkerSpec] = []
    for rank, (host, pair) in enumerate(zip(hosts, keys, strict=True)):
        own = RankSpec(
            rank=rank,
            plan=plan,
            watch=watch,
            server=keys[0].public,
            public=pair.public,
            secret=pair.secret,
            members=tuple(each.public for each in keys[1:]) if rank == 0 else (),
            ips=host.ips,
            devices=host.devices,
            beside=nodes.count(nodes[rank]),
            is_remote=nodes[rank] != LOCAL,
        )
        specs.append(_remote_spec(spec, group, own) if own.is_remote else replace(spec, rank=own))
    return specs


def _remote_spec(spec: WorkerSpec, group: GroupSpec, rank: RankSpec) -> WorkerSpec:
    """Return the specification of a rank on another machine, without this machine's sockets and template.

    The specification's memory is the share of all ranks on the rank's host.
    """
    parts = parts_of(group.size, group.split)
    host_part = sum(part for node, part in zip(group.nodes, parts, strict=True) if node == group.nodes[rank.rank])
    memory_bytes = int(group.memory_bytes * host_part)
    return replace(spec, rank=rank, down="", up="", chat_template="", memory_bytes=memory_bytes)


def _free_addresses(ip: str) -> tuple[str, str]:
    """Find two free addresses of this machine. Raises `OSError`."""
    with socket.socket() as plan_socket, socket.socket() as watch_socket:
        for each in (plan_socket, watch_socket):
            try:
                each.bind((ip, 0))
            except OSError as error:
                why = f"{ip}, of the first host in its host file, is no address of this machine, which runs rank 0"
                raise OSError(error.errno, f"{why} ({error.strerror})") from error
        plan, watch = (f"tcp://{ip}:{each.getsockname()[1]}" for each in (plan_socket, watch_socket))
        return plan, watch


class RankGroup:
    """Processes of a group as one `WorkerPort`: rank 0, which is the worker, and its followers.

    Rank 0 detects a lost follower itself. When `wait` returns, all processes have exited.
    """

    def __init__(self, lead: WorkerPort, followers: Sequence[WorkerPort], local_followers: Sequence[int]) -> None:
        """Group the processes; `local_followers` are the pids of the followers on this machine."""
        self.pids = (lead.pid, *local_followers)
        self._lead = lead
        self._followers = list(followers)
        # Followers that ended before rank 0.
        self._lost: list[WorkerPort] = []
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
            if not lead.done() and not self._is_killed:
                self._lost = [each for each, task in zip(self._followers, followers, strict=True) if task.done()]
            lost = [task.result() for task in followers if task.done()] if self._lost else []
            if lost and await self._end([self._lead], [lead], (LEAD_GRACE_S, signal.SIGTERM), (TERM_S, signal.SIGKILL)):
                # In a clean stop, followers may exit before rank 0 and do not count as lost.
                lost = [] if lead.result() == ExitStatus.OK else lost
            await asyncio.wait([lead])
            await self._end(self._followers, followers, (FOLLOWER_GRACE_S, signal.SIGTERM), (TERM_S, signal.SIGKILL))
        return _group_status(lead.result(), lost)

    async def _end(
        self,
        processes: Sequence[WorkerPort],
        waits: "Sequence[asyncio.Task[int | None]]",
        *steps: tuple[float, signal.Signals],
    ) -> bool:
        """Send each signal after its delay to the processes that still run. Return True if no signal was needed."""
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

    def failure(self) -> Failure | None:
        return next((failure for each in self._lost if (failure := each.failure()) is not None), None)

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


def _group_status(status: int | None, lost: Sequence[int | None]) -> int | None:
    """Return the exit status of a group. `status` is that of rank 0; `lost` are those of followers that ended before
    it.
    """
    if not lost:
        # Native code that loses another rank exits with status 1, and so does the guard that ends a rank stuck in
        # native code.
        return ExitStatus.PARTNER_LOST if status == 1 else status
    final = next((each for each in lost if each in FINAL_EXITS), None)
    if final is not None:
        return final
    fault = next((each for each in lost if each is not None and -each in _FAULTS), None)
    # A request may have caused a fault in native code, so it counts as a crash of the worker.
    return ExitStatus.PARTNER_LOST if fault is None else fault
