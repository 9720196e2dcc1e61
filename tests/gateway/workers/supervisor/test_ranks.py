"""Processes of a group: the end of rank 0 is the end of all, and the end of a follower that of rank 0."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
import zmq

from gateway.workers.supervisor.ranks import RankGroup, ranks_of, variables_of
from protocol.failures import ExitStatus, Failure
from protocol.sockets import encoded
from protocol.spec import LOCAL, GroupSpec, HostSpec, WorkerSpec
from tests.support.scale import patient

pytestmark = pytest.mark.anyio
ASLEEP = "import time; time.sleep(600)"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); {ASLEEP}"


class Rank:
    """A process of Python code."""

    is_adopted: bool = False

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.is_closed = False

    @classmethod
    async def running(cls, code: str) -> "Rank":
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        if "print" in code:
            await process.stdout.readline()
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int | None:
        return await self._process.wait()

    def signal(self, signum: int) -> None:
        if self._process.returncode is None:
            self._process.send_signal(signum)

    def last_lines(self) -> list[str]:
        return ["its last line"]

    def failure(self) -> Failure | None:
        return None

    def close(self) -> None:
        self.is_closed = True


async def end_of(lead: str, follower: str, kill: signal.Signals | None = None) -> tuple[int | None, int | None]:
    """Statuses of the group and of its follower; `kill` goes to the group."""
    ranks = [await Rank.running(lead), await Rank.running(follower)]
    group = RankGroup(ranks[0], ranks[1:], [ranks[1].pid])
    assert group.pids == tuple(rank.pid for rank in ranks)
    if kill is not None:
        group.signal(kill)
    async with asyncio.timeout(patient(30)):
        status = await group.wait()
    group.close()
    assert all(rank.is_closed for rank in ranks)
    assert group.last_lines() == ["rank 1: its last line", "its last line"]
    return status, await ranks[1].wait()


async def test_no_follower_outlives_rank_0_not_even_one_that_ignores_signals() -> None:
    assert await end_of("raise SystemExit(70)", DEAF) == (70, -signal.SIGKILL)


async def test_the_end_of_a_follower_is_that_of_a_group_which_lost_a_partner() -> None:
    status, _ = await end_of(ASLEEP, "raise SystemExit(70)")
    assert status == ExitStatus.PARTNER_LOST


async def test_a_follower_that_cannot_be_helped_by_another_start_says_so_for_its_group() -> None:
    status, _ = await end_of(ASLEEP, f"raise SystemExit({ExitStatus.MODEL_UNUSABLE})")
    assert status == ExitStatus.MODEL_UNUSABLE


async def test_native_code_that_lost_a_partner_ends_with_1() -> None:
    status, _ = await end_of("raise SystemExit(1)", ASLEEP)
    assert status == ExitStatus.PARTNER_LOST


async def test_a_clean_stop_is_one_whichever_rank_ends_first(tmp_path: Path) -> None:
    path = tmp_path / "ends"
    os.mkfifo(path)
    follower = f"held = open({str(path)!r}, 'w'); print(flush=True); raise SystemExit(72)"
    status, _ = await end_of(f"open({str(path)!r}).read()", follower)
    assert status == ExitStatus.OK


async def test_a_killed_group_is_killed_as_a_whole() -> None:
    assert await end_of(ASLEEP, DEAF, signal.SIGKILL) == (-signal.SIGKILL, -signal.SIGKILL)


def test_each_start_has_keys_and_ports_of_its_own_and_no_follower_the_secret_of_rank_0() -> None:
    spec = WorkerSpec("m", "demo", 1, "", "", group=GroupSpec((LOCAL, LOCAL, LOCAL), "tensor", "ring"))
    first, second = ([each.rank for each in ranks_of(spec)] for _ in range(2))
    places = [rank for rank in (*first, *second) if rank is not None]
    assert len(places) == 6
    assert len({rank.secret for rank in places}) == 6
    assert len({rank.plan for rank in places} | {rank.watch for rank in places}) == 4
    lead, *others = places[:3]
    assert lead.members == tuple(rank.public for rank in others)
    assert all(rank.server == lead.public and rank.members == () for rank in others)
    assert all(zmq.curve_public(encoded(rank.secret)) == encoded(rank.public) for rank in places)
    assert spec.group is not None
    assert spec.group.host(1).ips == ("127.0.0.1",), "a ring of one machine is not heard beyond it"


def test_a_rank_elsewhere_gets_its_host_s_part_of_the_memory_and_no_socket_or_template_of_this_machine() -> None:
    hosts = tuple(HostSpec(f"studio{rank}", (f"127.0.0.{rank}",), ("rdma",) * 4) for rank in (1, 2, 2, 3))
    group = GroupSpec((LOCAL, "studio2", "studio2", "studio3"), "pipeline", "ring", hosts, (), 800)
    spec = WorkerSpec("m", "demo", 1, "ipc://d", "ipc://u", chat_template="{{ 1 }}", memory_bytes=77, group=group)
    lead, *others = ranks_of(spec)
    assert (lead.memory_bytes, lead.down, lead.chat_template) == (77, "ipc://d", "{{ 1 }}")
    assert [each.memory_bytes for each in others] == [400, 400, 200]
    assert {(each.down, each.up, each.chat_template) for each in others} == {("", "", "")}
    ranks = [each.rank for each in (lead, *others) if each.rank is not None]
    assert [group.is_remote(rank) for rank in range(4)] == [False, True, True, True]
    assert [group.beside(rank) for rank in range(4)] == [1, 2, 2, 1]
    assert group.host(3).ips == ("127.0.0.3",)
    assert ranks[1].plan.startswith("tcp://127.0.0.1:"), "where rank 0 is reached"


@pytest.mark.parametrize(("backend", "gpus"), [("nccl", ["4", "5", "0"]), ("auto", ["4", "5", "0"]), ("ring", [])])
def test_ranks_of_nccl_see_one_gpu_each(backend: str, gpus: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    hosts = tuple(HostSpec(ssh, ("127.0.0.1",)) for ssh in ("near", "near", "far"))
    group = GroupSpec((LOCAL, LOCAL, "far"), "tensor", backend, hosts, ("A=1=2",))
    ranks = [variables_of(each) for each in ranks_of(WorkerSpec("m", "demo", 1, "", "", group=group))]
    assert [each["A"] for each in ranks] == ["1=2"] * 3
    assert [each["CUDA_VISIBLE_DEVICES"] for each in ranks if "CUDA_VISIBLE_DEVICES" in each] == gpus


def test_a_host_file_whose_first_host_is_another_machine_is_told() -> None:
    hosts = (HostSpec("studio2", ("192.0.2.7",)), HostSpec("studio1", ("127.0.0.1",)))
    group = GroupSpec((LOCAL, "studio1"), "pipeline", "ring", hosts)
    with pytest.raises(OSError, match=r"192\.0\.2\.7, of the first host in its host file, is no address of this"):
        ranks_of(WorkerSpec("m", "demo", 1, "", "", group=group))
