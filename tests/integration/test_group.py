"""A model that two processes run, behind a real daemon: ranks that die or hang are a pause for its clients."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.test_resume import Clients, Daemon, check_equal, lasting, requests, undisturbed
from tests.support.daemon import is_running, write_config
from tests.support.models import build
from tests.support.pool import short_home, until
from tests.support.scale import patient

pytestmark = pytest.mark.anyio
DEADLINE_S = 90
GROUP = 'group = { nodes = ["local", "local"], parallel = "pipeline", backend = "ring" }'


class GroupDaemon(Daemon):
    """With one model, on two ranks."""

    def ranks(self) -> list[psutil.Process]:
        """Processes of the group, rank 0 first."""
        children = psutil.Process(self.process.pid).children()
        ranked = [(child.cmdline(), child) for child in children if "--rank" in child.cmdline()]
        return [child for argv, child in sorted(ranked, key=lambda pair: pair[0][pair[0].index("--rank") + 1])]


@pytest.fixture(scope="module")
def group_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("qwen3_moe", tmp_path_factory.mktemp("group"), num_hidden_layers=2)


@pytest.fixture
def home(group_model: Path) -> Iterator[Path]:
    with short_home() as home:
        write_config(home, ("m",))
        config = home / "mlxd.toml"
        config.write_text(config.read_text().replace('path = "demo"', f'path = "{group_model}"\n{GROUP}'))
        yield home


@pytest.fixture
def daemon(home: Path) -> Iterator[GroupDaemon]:
    with GroupDaemon(home, module="gateway.main") as running:
        yield running
        left = running.ranks()
    end = time.monotonic() + patient(DEADLINE_S)
    while any(is_running(process.pid) for process in left):
        assert time.monotonic() < end, "a rank outlives its daemon"
        time.sleep(0.05)


@pytest.mark.soak
async def test_streams_go_on_when_a_rank_is_killed_and_when_one_hangs(daemon: GroupDaemon) -> None:
    bodies = requests(64, max_tokens=lasting(200))
    expected, total = await undisturbed(daemon, bodies)
    pids: set[int] = set()
    clients = Clients(daemon.url)
    running = asyncio.create_task(clients.run(bodies))
    kills = [(1, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGSTOP)]
    for kill, (rank, signum) in enumerate(kills):
        await until(lambda kill=kill: clients.received >= total * (kill + 1) // 12 or running.done(), DEADLINE_S)
        await until(lambda kill=kill: running.done() or daemon.is_ready(epoch=kill + 1), DEADLINE_S)
        assert not running.done(), "every kill must hit something"
        ranks = daemon.ranks()
        assert len(ranks) == 2
        pids |= {process.pid for process in ranks}
        ranks[rank].send_signal(signum)
    check_equal(await running, expected)
    model = daemon.model()
    assert model["epoch"] == len(kills) + 1
    assert daemon.counter("requests_quarantined_total") == 0
    assert not pids & set(psutil.pids()), "every rank of an earlier start has ended"


@pytest.mark.soak
async def test_the_next_gateway_adopts_all_ranks_and_ends_them_together(home: Path) -> None:
    body = {"model": "m", "prompt": "ka to", "max_tokens": 8, "temperature": 0}

    def answer(daemon: GroupDaemon) -> str:
        response = daemon.client.post("/v1/completions", json=body, timeout=patient(DEADLINE_S))
        return response.json()["choices"][0]["text"]

    first = GroupDaemon(home, module="gateway.main").__enter__()
    expected, ranks = answer(first), first.ranks()
    first.process.kill()
    first.process.wait()
    first.client.close()
    with GroupDaemon(home, module="gateway.main") as daemon:
        await until(lambda: daemon.is_ready(epoch=1), DEADLINE_S)
        assert [rank["pid"] for rank in daemon.model()["group"]["ranks"]] == [process.pid for process in ranks]
        assert answer(daemon) == expected
        ranks[1].kill()
        await until(lambda: not ranks[0].is_running(), DEADLINE_S)
        assert answer(daemon) == expected
        assert daemon.is_ready(epoch=2)


def test_status_knows_the_ranks(daemon: GroupDaemon) -> None:
    body: dict[str, Any] = {"model": "m", "prompt": "ka to", "max_tokens": 2, "temperature": 0}
    assert daemon.client.post("/v1/completions", json=body).status_code == 200
    group = daemon.model()["group"]
    assert (group["parallel"], group["backend"]) == ("pipeline", "ring")
    assert [rank["node"] for rank in group["ranks"]] == ["local", "local"]
    assert group["ranks"][1]["pid"] == daemon.ranks()[1].pid


@pytest.mark.soak
def test_mlxctl_verify_finds_nothing(daemon: GroupDaemon) -> None:
    command = [sys.executable, "-P", "-c", "from gateway.ctl import main; main()", "verify", "m", "--json"]
    done = subprocess.run(
        [*command, "--tokens", "4"],
        env=os.environ | {"MLXD_HOME": str(daemon.home)},
        capture_output=True,
        text=True,
        timeout=patient(120),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    checks = [json.loads(line) for line in done.stdout.splitlines()]
    assert [check["name"] for check in checks][-3:] == ["cache in memory", "preempted", "resumed"]
