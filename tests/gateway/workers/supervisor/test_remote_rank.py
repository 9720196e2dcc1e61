"""The process of a rank on another machine, by what its ssh client prints and how it ends; the client is a script."""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from gateway.workers.supervisor.ranks import RankGroup, ssh_command
from gateway.workers.supervisor.registry import Registry
from gateway.workers.supervisor.spawn import Spawner
from gateway.workers.supervisor.state import WorkerPort
from protocol import __version__
from protocol.failures import Code, ExitStatus
from protocol.spec import LOCAL, GroupSpec, HostSpec, WorkerSpec
from tests.gateway.harness import until
from tests.support.pool import short_home

pytestmark = pytest.mark.anyio
SLEEPS = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"]
# What runs on the other machine: it prints what it was given, and ends with its standard input.
TELLS = "import os, sys; print('INFO', os.environ['A'], sys.stdin.readline(), flush=True); sys.stdin.read()"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with short_home() as home:
        (home / "run" / "d.sock").touch()
        yield home


def client(folder: Path, script: str) -> None:
    """The ssh client; the command for the other machine is its last argument."""
    ssh = folder / "ssh"
    ssh.write_text(f"#!/bin/sh\n{script}\n")
    ssh.chmod(0o755)


def start(home: Path, envs: tuple[str, ...] = (), there: str = "pass") -> WorkerPort:
    """A group whose rank 0 sleeps, and whose rank 1 runs some Python at `me@far`."""
    hosts = (HostSpec("near", ("127.0.0.1",)), HostSpec("me@far", ("127.0.0.1",)))
    group = GroupSpec((LOCAL, "me@far"), "pipeline", "ring", hosts, envs)
    spec = WorkerSpec("m", "demo", 7, f"ipc://{home}/run/d.sock", "ipc://u", group=group)

    def command(each: WorkerSpec) -> list[str]:
        assert each.rank is not None
        return [sys.executable, "-I", "-S", "-c", there] if each.rank.rank > 0 else SLEEPS

    return Spawner(home, Registry(home / "run"), command).spawn(spec)


@pytest.mark.parametrize(
    ("script", "status", "code", "words"),
    [
        (
            "echo 'Host key verification failed.' >&2; exit 255",
            ExitStatus.BAD_CONFIG,
            Code.BAD_CONFIG,
            "is not known: run",
        ),
        (
            "echo 'me@far: Permission denied (publickey).' >&2; exit 255",
            ExitStatus.BAD_CONFIG,
            Code.BAD_CONFIG,
            "ssh-copy-id me@far",
        ),
        (
            "echo 'ssh: connect to host far port 22: No route to host' >&2; exit 255",
            ExitStatus.PARTNER_LOST,
            Code.WORKER_DIED,
            "it cannot be reached: it must be on, and allow logins over ssh (on a Mac: Remote Login) (ssh: connect to",
        ),
        (
            "echo 'ssh: Could not resolve hostname far: Name or service not known' >&2; exit 255",
            ExitStatus.PARTNER_LOST,
            Code.WORKER_DIED,
            "its name cannot be found",
        ),
        (
            "echo 'Timeout, server far not responding.'; exit 255",
            ExitStatus.PARTNER_LOST,
            Code.WORKER_DIED,
            "the connection to it has ended (Timeout, server far not responding.)",
        ),
        ("kill -9 $$", ExitStatus.PARTNER_LOST, Code.WORKER_DIED, "its ssh client has ended"),
        (
            "echo 'sh: 1: /x/python: not found'; exit 127",
            ExitStatus.BAD_CONFIG,
            Code.BAD_CONFIG,
            "install mlxd there at the same path as here",
        ),
        (
            "echo '/x/python: No module named worker'; exit 1",
            ExitStatus.BAD_CONFIG,
            Code.BAD_CONFIG,
            "has no mlxd there",
        ),
        (
            "echo 'worker: error: unrecognized arguments: --over-ssh 1'; exit 2",
            ExitStatus.INCOMPATIBLE,
            Code.INCOMPATIBLE,
            f"mlxd is older there: install {__version__}",
        ),
        (
            "echo 'ERROR of before'; echo 'ERROR the rank ends: there is no folder /m'; echo 'INFO bye'; exit 66",
            ExitStatus.MODEL_UNUSABLE,
            Code.MODEL_CORRUPT,
            "the rank ends: there is no folder /m",
        ),
    ],
)
async def test_the_end_of_a_client_is_one_that_an_operator_understands(
    home: Path, tmp_path: Path, script: str, status: int, code: Code, words: str
) -> None:
    client(tmp_path, script)
    group = start(home)
    try:
        assert await group.wait() == status
        failure = group.failure()
        assert failure is not None
        assert failure.code is code
        assert failure.message.startswith("rank 1 of 'm' on me@far: ")
        assert words in failure.message
    finally:
        group.close()


@pytest.mark.parametrize(("end", "status"), [("exit 70", ExitStatus.PARTNER_LOST), ("exit 139", -signal.SIGSEGV)])
async def test_a_rank_that_has_run_ends_its_group_as_one_of_this_machine_does(
    home: Path, tmp_path: Path, end: str, status: int
) -> None:
    client(tmp_path, end)
    group = start(home)
    try:
        assert await group.wait() == status
        assert group.failure() is None
    finally:
        group.close()


async def test_a_rank_gets_its_variables_and_specification_by_its_input_and_ends_with_it(
    home: Path, tmp_path: Path
) -> None:
    client(tmp_path, 'shift $(($# - 1)); exec sh -c "$1"')
    group = start(home, ("A=it's $HOME `id`", "B="), TELLS)
    try:
        assert isinstance(group, RankGroup)
        await until(lambda: any("it's $HOME `id`" in line for line in group.last_lines()))
        (line,) = [line for line in group.last_lines() if "it's" in line]
        spec = msgspec.json.decode(line.partition("`id` ")[2], type=WorkerSpec)
        assert spec.rank is not None
        assert (spec.rank.rank, spec.down) == (1, "")
        assert TELLS in listed()
        assert spec.rank.secret not in listed()
        assert "`id`" not in listed()
        group.signal(signal.SIGKILL)
        await group.wait()
        await until(lambda: TELLS not in listed())
    finally:
        group.close()


def listed() -> str:
    """The commands of all processes."""
    return subprocess.run(["ps", "-wweo", "args"], capture_output=True, text=True, check=True).stdout


async def test_a_rank_that_is_asked_to_end_is_left_by_its_input_before_its_client_is_killed(
    home: Path, tmp_path: Path
) -> None:
    client(tmp_path, f"cat > {tmp_path}/given; echo ended > {tmp_path}/ended; exit 72")
    group = start(home)
    try:
        group.signal(signal.SIGTERM)  # to rank 0, which ends
        assert await group.wait() == -signal.SIGTERM
        assert (tmp_path / "ended").read_text() == "ended\n"
        assert b'"secret"' in (tmp_path / "given").read_bytes()
    finally:
        group.close()


def test_a_destination_and_arguments_are_no_options_and_no_shell_s() -> None:
    command = ssh_command("-oProxyCommand=x", "/a b/python", ["-P", "-m", "worker", "it's"])
    assert command[-3:-1] == ["--", "-oProxyCommand=x"]
    (program,) = [part for part in shlex.split(command[-1]) if "worker" in part]
    assert "'/a b/python' -P -m worker 'it'\"'\"'s' --over-ssh" in program
    assert "BatchMode=yes" in command
