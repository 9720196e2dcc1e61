import msgspec
import pytest

from gateway.supervisor.registry import Registry, WorkerRecord
from gateway.supervisor.spawn import Spawner, default_command
from protocol.failures import Exit
from protocol.spec import WorkerSpec
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
            assert await child.wait() == Exit.BAD_CONFIG, child.last_lines()
            await until(lambda: any("max_running" in line for line in child.last_lines()))
        finally:
            child.close()
        assert {path.name for path in run_dir.iterdir()} <= {"d.sock", "epoch", "workers"}
