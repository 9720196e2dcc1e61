"""A model whose rank 1 is started over a real ssh: it answers as one process does, and a lost rank is a pause."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.test_resume import Clients, Daemon, check_equal, lasting, requests, undisturbed
from tests.support.daemon import is_running
from tests.support.models import build
from tests.support.pool import short_home, until
from tests.support.scale import patient
from tests.support.sshd import FAR, Sshd, needs_sshd

pytestmark = [pytest.mark.anyio, needs_sshd]
DEADLINE_S = 90
# From the end of a connection to that of its rank.
GONE_S = 10


@dataclass(slots=True)
class Office:
    """A home whose model has rank 1 at `far`; `daemon` serves it once it was started."""

    home: Path
    far: Sshd
    model: Path

    def configure(self, model: Path | str = "", **hosts: object) -> None:
        """`hosts` is more of the host file."""
        machines = [{"ssh": "near", "ips": ["127.0.0.1", "127.0.0.1"]}, {"ssh": FAR, "ips": ["127.0.0.1"] * 2}]
        (self.home / "hosts.json").write_text(json.dumps({"envs": self.far.envs(), "hosts": machines} | hosts))
        (self.home / "mlxd.toml").write_text(
            f'[server]\nport = 0\n[models.m]\npath = "{model or self.model}"\n'
            f'group = {{ hosts = "hosts.json", parallel = "pipeline", backend = "ring" }}\n'
        )

    def client(self, daemon: Daemon) -> psutil.Process:
        """The ssh client of rank 1."""
        children = psutil.Process(daemon.process.pid).children()
        (client,) = [child for child in children if child.name() == "ssh"]
        return client

    def rank(self) -> psutil.Process:
        (rank,) = [process for process in self.far.ranks() if "python" in process.name()]
        return rank


@pytest.fixture(scope="module")
def group_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("qwen3_moe", tmp_path_factory.mktemp("group"), num_hidden_layers=2)


@pytest.fixture
def office(group_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Office]:
    with Sshd(tmp_path) as far, short_home() as home:
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setenv("PATH", f"{far.bin}{os.pathsep}{os.environ['PATH']}")
        office = Office(home, far, group_model)
        office.configure()
        yield office
        end = time.monotonic() + patient(DEADLINE_S)
        while left := far.ranks():
            if time.monotonic() > end:
                for process in left:
                    process.kill()
                raise AssertionError("a rank outlives its daemon")
            time.sleep(0.05)


async def gone(process: psutil.Process) -> float:
    """Seconds until a process has ended."""
    began = time.monotonic()
    await until(lambda: not is_running(process.pid), GONE_S)
    return time.monotonic() - began


def answer(daemon: Daemon, model: str) -> dict[str, Any]:
    body = {"model": model, "prompt": "ka to mi ra sen", "max_tokens": 24, "temperature": 0, "logprobs": 2}
    response = daemon.client.post("/v1/completions", json=body, timeout=patient(DEADLINE_S))
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


async def test_a_rank_over_ssh_generates_what_one_process_does(office: Office) -> None:
    config = office.home / "mlxd.toml"
    with Daemon(office.home, module="gateway.main") as daemon:
        given = answer(daemon, "m")
        ranks = daemon.model()["group"]["ranks"]
        rank = office.rank()
        assert [(each["node"], each["pid"]) for each in ranks[1:]] == [(FAR, rank.pid)]
        # Keys and variables are in no list of processes.
        commands = [" ".join(process.cmdline()) for process in (office.client(daemon), rank, rank.parent()) if process]
        assert len(commands) == 3
        assert not any("secret" in command or "PYTHONPATH" in command for command in commands)
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.wait(patient(DEADLINE_S)) == 0
        await gone(rank)
    config.write_text(f'[server]\nport = 0\n[models.alone]\npath = "{office.model}"\n')
    with Daemon(office.home, module="gateway.main") as daemon:
        assert given == answer(daemon, "alone")


async def disturbed(
    daemon: Daemon, bodies: list[dict[str, Any]], total: int, disturb: Callable[[], None]
) -> "asyncio.Task[list[Any]]":
    """The requests under way, of which clients have a part at the disturbance."""
    clients = Clients(daemon.url)
    running = asyncio.create_task(clients.run(bodies))
    await until(lambda: clients.received >= total // 6 or running.done(), DEADLINE_S)
    assert not running.done(), "the kill must hit something"
    disturb()
    return running


@pytest.mark.soak
async def test_a_rank_is_gone_with_its_ssh_client_and_streams_go_on(office: Office) -> None:
    with Daemon(office.home, module="gateway.main") as daemon:
        bodies = requests(8, max_tokens=lasting(120))
        expected, total = await undisturbed(daemon, bodies)
        rank = office.rank()
        running = await disturbed(daemon, bodies, total, office.client(daemon).kill)
        assert await gone(rank) < patient(GONE_S)
        check_equal(await running, expected)
        assert daemon.model()["epoch"] == 2
        assert daemon.counter("requests_quarantined_total") == 0


@pytest.mark.soak
async def test_streams_go_on_when_the_rank_or_its_connection_is_lost(office: Office) -> None:
    with Daemon(office.home, module="gateway.main") as daemon:
        bodies = requests(32, max_tokens=lasting(60))
        expected, total = await undisturbed(daemon, bodies)

        running = await disturbed(daemon, bodies, total, office.rank().kill)
        check_equal(await running, expected)
        await until(lambda: daemon.is_ready(epoch=2), DEADLINE_S)

        # The other end says nothing any more, and no connection ends: the ranks' heartbeats find out.
        rank, sessions = office.rank(), office.far.sessions()
        stopped = [process for process in sessions if process.name() == "sshd"]
        assert stopped

        def stop() -> None:
            for process in stopped:
                process.suspend()
            rank.suspend()

        running = await disturbed(daemon, bodies, total, stop)
        check_equal(await running, expected)
        # A rank that went on before the heartbeat failed would end the streams, and no request would need a successor.
        rank.resume()
        assert await gone(rank) < patient(GONE_S)
        await until(lambda: daemon.is_ready(epoch=3), DEADLINE_S)
        for process in stopped:
            process.resume()
        assert daemon.counter("requests_quarantined_total") == 0


@pytest.mark.soak
async def test_an_idle_rank_ends_with_its_connection(office: Office) -> None:
    with Daemon(office.home, module="gateway.main") as daemon:
        expected = answer(daemon, "m")
        rank = office.rank()
        for process in office.far.sessions():
            if process.name() == "sshd":
                process.kill()
        await until(lambda: not is_running(rank.pid), 30)
        assert answer(daemon, "m") == expected


@pytest.mark.soak
async def test_a_killed_gateway_and_rank_0_leave_nothing_on_the_other_machine(office: Office) -> None:
    with Daemon(office.home, module="gateway.main") as daemon:
        expected = answer(daemon, "m")
        rank, lead = office.rank(), daemon.worker_pids()
        daemon.kill()
        for pid in lead:
            os.kill(pid, signal.SIGKILL)
        assert await gone(rank) < patient(GONE_S)
    with Daemon(office.home, module="gateway.main") as daemon:
        assert answer(daemon, "m") == expected


@pytest.mark.soak
async def test_a_stopped_server_is_waited_for(office: Office) -> None:
    office.far.stop()
    with Daemon(office.home, module="gateway.main") as daemon:
        loading = asyncio.create_task(asyncio.to_thread(answer, daemon, "m"))
        await asyncio.sleep(3)
        office.far.start()
        assert (await loading)["text"]
        assert daemon.model()["epoch"] == 1


@dataclass(frozen=True, slots=True)
class Fault:
    """A way in which rank 1 cannot run, and what the model's status says of it."""

    make: Callable[[Office], None]
    words: str
    state: str = "failed"
    is_final: bool = True


def unknown_key(office: Office) -> None:
    office.far.known_hosts.write_text("")


def another_key(office: Office) -> None:
    other = " ".join((office.far.folder / "user.pub").read_text().split()[:2])
    office.far.known_hosts.write_text(f"[127.0.0.1]:{office.far.port} {other}\n")


def refused_login(office: Office) -> None:
    office.far.authorized.write_text("")


def no_python(office: Office) -> None:
    other_python(office, Path("/opt/nowhere/python"))


def python_of(office: Office, command: str) -> None:
    """An interpreter on the other machine that is not like this one's."""
    script = office.far.folder / "python"
    script.write_text(f"#!/bin/sh\n{command}\n")
    script.chmod(0o755)
    other_python(office, script)


def other_python(office: Office, path: Path) -> None:
    """Let the path of this interpreter mean another one on the other machine: the ssh client exchanges it."""
    client = office.far.bin / "ssh"
    original = office.far.bin / "original"
    client.rename(original)
    client.write_text(
        f"#!{sys.executable}\nimport os, sys\n*options, command = sys.argv\n"
        f"command = command.replace({sys.executable!r}, {str(path)!r})\n"
        f"os.execv({str(original)!r}, [*options, command])\n"
    )
    client.chmod(0o755)


def no_mlxd(office: Office) -> None:
    python_of(office, f'PYTHONPATH= exec {sys.executable} -I -S "$@"')


def other_version(office: Office) -> None:
    python_of(office, f'exec {sys.executable} "$@" --over-ssh 0.0.9')


def no_model(office: Office) -> None:
    """A repository that is in the cache of this machine alone."""
    snapshot = Path(os.environ["HF_HUB_CACHE"]) / "models--org--m" / "snapshots" / "abc"
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(office.model)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    python_of(office, f'HF_HUB_CACHE=/opt/nowhere exec {sys.executable} "$@"')
    office.configure(model="org/m")


def no_server(office: Office) -> None:
    office.far.stop()


@pytest.mark.soak
@pytest.mark.parametrize(
    "fault",
    [
        Fault(unknown_key, "on far: its host key is not known: run 'ssh far' once"),
        Fault(another_key, "on far: its host key is another one than before"),
        Fault(refused_login, "on far: it refuses the login: give it the public key"),
        Fault(no_python, f"on far: it cannot run {sys.executable}: install mlxd there"),
        Fault(no_mlxd, "has no mlxd there: install it"),
        Fault(other_version, "at rank 0: install the same", state="incompatible"),
        Fault(no_model, "org/m is neither a folder nor in the local Hugging Face cache; download it with"),
        Fault(no_server, "on far: it cannot be reached: it must be on", is_final=False),
    ],
    ids=lambda fault: fault.make.__name__,
)
async def test_a_rank_that_cannot_run_says_in_the_model_s_status_what_to_do(office: Office, fault: Fault) -> None:
    fault.make(office)
    with Daemon(office.home, module="gateway.main") as daemon:
        response = daemon.client.post("/v1/completions", json={"model": "m", "prompt": "a", "max_tokens": 2})
        assert response.status_code == 503
        model = daemon.model()
        assert model["state"] == fault.state
        assert fault.words in model["last_failure"]
        assert "far" in model["last_failure"]
        assert (model["epoch"] == 1) is fault.is_final, "what an operator must mend is not tried again"
