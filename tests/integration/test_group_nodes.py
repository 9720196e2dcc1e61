"""One model over two daemons at two loopback addresses: it serves, and a lost node is a pause for its clients."""

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from gateway.nodes.node_keys import keep_public, own_pair
from tests.gateway.nodes.hosts import THERE, needs_second_loopback
from tests.integration.test_resume import Answer, Clients, Daemon, check_equal, lasting, requests, undisturbed
from tests.support.daemon import is_running
from tests.support.models import build
from tests.support.pool import short_home, until

pytestmark = [pytest.mark.anyio, needs_second_loopback]
DEADLINE_S = 90
GROUP = 'group = { nodes = ["local", "studio2"], parallel = "pipeline", backend = "ring" }'


@dataclass(slots=True)
class Office:
    """The daemon that serves the model, and the one whose agent runs a rank of it."""

    near: Daemon
    far_home: Path
    far: Daemon

    def far_ranks(self) -> list[psutil.Process]:
        """Processes of ranks at the far daemon."""
        if not is_running(self.far.process.pid):
            return []
        children = psutil.Process(self.far.process.pid).children()
        return [child for child in children if child.is_running() and "--rank" in _argv(child)]


def _argv(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.fixture(scope="module")
def group_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("qwen3_moe", tmp_path_factory.mktemp("group"), num_hidden_layers=2)


@pytest.fixture
def office(group_model: Path) -> Iterator[Office]:
    with ExitStack() as stack:
        near_home, far_home = (stack.enter_context(short_home()) for _ in range(2))
        port = _free_port(THERE)
        keep_public(near_home, "studio2", own_pair(far_home).public)
        keep_public(far_home, "studio1", own_pair(near_home).public)
        (near_home / "mlxd.toml").write_text(
            f'[server]\nport = 0\nnode = "studio1"\n[models.m]\npath = "{group_model}"\n{GROUP}\n'
            f'[nodes.studio2]\naddress = "{THERE}:{port}"\nkey = "keys/studio2.public"\n'
        )
        # Another name, and another folder with the same files: the form tells that it is this model.
        (far_home / "copy").symlink_to(group_model)
        (far_home / "mlxd.toml").write_text(
            f'[server]\nport = 0\nnode = "studio2"\n[models.other]\npath = "{far_home}/copy"\n'
            f'[node]\nlisten = "{THERE}:{port}"\n[nodes.studio1]\nkey = "keys/studio1.public"\n'
        )
        far = stack.enter_context(Daemon(far_home, module="gateway.main"))
        yield Office(stack.enter_context(Daemon(near_home, module="gateway.main")), far_home, far)


def _free_port(host: str) -> int:
    with socket.socket() as free:
        free.bind((host, 0))
        return free.getsockname()[1]


@pytest.mark.soak
async def test_a_model_over_two_daemons_serves_and_a_lost_node_is_a_pause(office: Office) -> None:
    bodies = requests(32, max_tokens=lasting(40))
    expected, total = await undisturbed(office.near, bodies)
    clients = Clients(office.near.url)

    async def disturbed(share: int) -> asyncio.Task[list[Answer]]:
        """The same requests, of which clients have a part by now."""
        begun = clients.received
        running = asyncio.create_task(clients.run(bodies))
        await until(lambda: clients.received - begun >= total // share or running.done(), DEADLINE_S)
        assert not running.done(), "the kill must hit something"
        return running

    (rank,) = office.far_ranks()
    running = await disturbed(5)
    rank.send_signal(signal.SIGKILL)
    check_equal(await running, expected)
    await until(lambda: office.near.model()["state"] == "ready", DEADLINE_S)

    # The whole machine: nobody says that its rank is gone.
    (rank,) = office.far_ranks()
    running = await disturbed(5)
    office.far.kill()
    rank.send_signal(signal.SIGKILL)
    with Daemon(office.far_home, module="gateway.main") as office.far:
        check_equal(await running, expected)
        assert office.near.model()["epoch"] == 3
        assert office.near.counter("requests_quarantined_total") == 0
        (rank,) = office.far_ranks()

        # The gateway vanishes with rank 0: what it had elsewhere ends.
        lead = office.near.worker_pids()
        office.near.kill()
        for pid in lead:
            os.kill(pid, signal.SIGKILL)
        await until(lambda: not is_running(rank.pid), DEADLINE_S)
