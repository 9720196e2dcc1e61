"""Events of a prefix cache, from a real worker to a subscriber as a router has it; and addresses that are refused."""

from pathlib import Path

import msgspec
import pytest
import zmq

from tests.support.ctl import ctl
from tests.support.daemon import DaemonProcess
from tests.support.scale import patient
from tests.worker.prefix_cache.test_block_events import free_address
from worker.prefix_cache.kv_events import BLOCK


def test_a_served_prompt_is_told_as_blocks_of_its_tokens(tmp_path: Path) -> None:
    endpoint = free_address()
    host, port = endpoint.rsplit(":", 1)
    replay = f"{host}:{int(port) + 1}"
    table = f'kv_events = "{endpoint}"'
    (tmp_path / "mlxd.toml").write_text(f'[server]\nport = 0\n[models.demo]\npath = "demo"\n{table}\n')
    context = zmq.Context()
    try:
        with DaemonProcess(tmp_path, module="gateway.main") as daemon:
            body = {"model": "demo", "prompt": "one two three " * 60, "max_tokens": 1}
            reply = daemon.client.post("/v1/completions", json=body, timeout=patient(60)).json()
            asker = context.socket(zmq.DEALER)
            asker.connect(replay)
            asker.send(bytes(8))
            events: list[list[object]] = []
            while asker.poll(patient(10) * 1000) and (parts := asker.recv_multipart())[-1]:
                events += msgspec.msgpack.decode(parts[-1])[1]
    finally:
        context.destroy(linger=0)
    assert events[0] == ["AllBlocksCleared"]
    (stored,) = [event for event in events if event[0] == "BlockStored"]
    ids = stored[3]
    assert isinstance(ids, list)
    assert len(ids) == reply["usage"]["prompt_tokens"] // BLOCK * BLOCK
    assert stored[4] == BLOCK


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ('"tcp://127.0.0.1:65535"', "no address"),
        ('"ipc:///tmp/x"', "no address"),
        ('"tcp://localhost:5557"', "write 127.0.0.1"),
        ('{ endpoint = "tcp://127.0.0.1:5557" }', "endpoint is gone"),
    ],
)
def test_addresses_at_which_nothing_can_be_published_are_refused(tmp_path: Path, table: str, reason: str) -> None:
    (tmp_path / "mlxd.toml").write_text(f'[models.demo]\npath = "demo"\nkv_events = {table}\n')
    done = ctl(tmp_path, "config", "check")
    assert done.returncode != 0
    assert reason in done.stdout + done.stderr
