import os
import sys

import msgspec
import psutil
import pytest

from gateway.workers.supervisor.registry import Registry, WorkerRecord
from gateway.workers.supervisor.spawn import Spawner, default_command
from protocol.failures import ExitStatus
from protocol.spec import GroupSpec, HostSpec, WorkerSpec
from tests.gateway.harness import until
from tests.support.pool import short_home

# Linux takes no argument longer than 128 KiB.
TEMPLATE = "{# no secret, but nobody's business #}" + "{{ messages }}" * 20_000


@pytest.mark.anyio
async def test_a_worker_is_told_its_specification_where_no_list_of_processes_shows_it() -> None:
    with short_home() as home:
        run_dir = home / "run"
        (run_dir / "d.sock").touch()
        # That nothing can run is refused before the second that importing MLX takes.
        down = f"ipc://{run_dir}/d.sock"
        spec = WorkerSpec("m", "demo", 7, down, "ipc://u", max_running=-1, chat_template=TEMPLATE)
        child = Spawner(home, Registry(run_dir), default_command).spawn(spec)
        try:
            record = msgspec.json.decode((run_dir / "workers" / "m.json").read_bytes(), type=WorkerRecord)
            assert record.argv[-5:] == ["m", "--epoch", "7", "--spec", "-"]
            assert record.spec == spec
            assert await child.wait() == ExitStatus.BAD_CONFIG, child.last_lines()
            await until(lambda: any("max_running" in line for line in child.last_lines()))
        finally:
            child.close()
        assert {path.name for path in run_dir.iterdir()} <= {"d.sock", "epoch", "workers"}


@pytest.mark.anyio
async def test_a_group_whose_last_rank_cannot_be_started_leaves_no_process_pipe_or_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with short_home() as home:
        run_dir = home / "run"
        (run_dir / "d.sock").touch()
        spec = WorkerSpec("m", "demo", 7, f"ipc://{run_dir}/d.sock", "ipc://u")
        hosts = tuple(HostSpec("far", ("127.0.0.1",)) for _ in range(3))
        group = GroupSpec(("local", "local", "far"), "pipeline", "ring", hosts=hosts)
        spec = msgspec.structs.replace(spec, group=group)
        monkeypatch.setenv("PATH", str(home))
        command = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"]
        spawner = Spawner(home, Registry(run_dir), lambda _: command)
        children, before = psutil.Process().children(), len(os.listdir("/dev/fd"))
        with pytest.raises(FileNotFoundError, match="ssh"):
            spawner.spawn(spec)

        assert len(os.listdir("/dev/fd")) == before
        assert list((run_dir / "workers").iterdir()) == []
        assert psutil.Process().children() == children
