"""Statistics of a worker from their declaration to the series of Prometheus and the status of the admin API."""

import json
from pathlib import Path
from typing import Annotated, Any

import httpx2
import msgspec
import pytest

from gateway.control_types import DaemonStatus
from gateway.ctl.tables import compare
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.prometheus import Exposition
from gateway.web.schemas import ModelTick
from protocol.from_worker import Pong
from protocol.stats import Exported, Internal, Stats, StatusStats, marks, series
from tests.gateway.harness import chat, running, until
from tests.support.statistics import distinct
from worker.engine.gauges import Gauges
from worker.speculation.policy import Speculator
from worker.speculation.text_sources import DraftSource

pytestmark = pytest.mark.anyio

GOLDEN = Path(__file__).parent / "golden_statistics.json"
# Of the daemon and the machine, not of the worker's statistics.
GATEWAYS = ("build_info", "log_records_dropped", "_bucket{", "_sum{", "_count{")
VOLATILE = {"pid", "since_s", "uptime_s", "idle_s", "share_bytes", "floor_bytes", "footprint_bytes", "inside"}


def exposition() -> list[str]:
    metrics = Metrics()
    metrics.state("m", "ready")
    metrics.pong("m", Pong(1, 1, distinct()))
    lines = Exposition(metrics, has_vllm_names=True).text().decode().splitlines()
    ours = [line for line in lines if line.split(" ")[2 if line[0] == "#" else 0].startswith(("mlxd_", "vllm:"))]
    return sorted(line for line in ours if not any(name in line for name in GATEWAYS))


async def status_and_sample(home: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The model's part of `GET /v1/status` and of `mlxctl ps --json`."""
    async with running(home, worker="reporting") as gateway:
        assert (await gateway.client.post("/v1/chat/completions", json=chat())).status_code == 200
        worker = gateway.pool.worker("m")
        await until(lambda: worker.stats is not None)
        transport = httpx2.ASGITransport(gateway.admin)  # pyright: ignore[reportArgumentType]
        async with httpx2.AsyncClient(transport=transport, base_url="http://mlxd") as admin:
            answer = (await admin.get("/v1/status")).content
    status = msgspec.json.decode(answer, type=DaemonStatus)
    sample = compare(status, status, 0.0)
    return json.loads(answer)["models"][0], json.loads(msgspec.json.encode(sample.models[0]))


async def test_what_users_read_of_a_workers_statistics_stays_as_it_is(tmp_path: Path) -> None:
    status, sample = await status_and_sample(tmp_path)
    shown = {
        "prometheus": exposition(),
        "status": {name: None if name in VOLATILE else value for name, value in status.items()},
        "sample": {name: None if name in VOLATILE | {"memory_bytes"} else value for name, value in sample.items()},
        "tick": sorted(ModelTick.__struct_fields__),
    }
    assert shown == json.loads(GOLDEN.read_text())


async def test_every_statistic_that_is_declared_is_shown_or_internal(tmp_path: Path) -> None:
    status, _ = await status_and_sample(tmp_path)
    lines, stats = exposition(), distinct()
    for name in Stats.__struct_fields__:
        mark, value = marks(Stats).get(name), getattr(stats, name)
        if isinstance(mark, Exported):
            suffix = "_total" if mark.type == "counter" else ""
            kind = f'kind="{mark.kind}",' if mark.kind else ""
            assert f'mlxd_{mark.name}{suffix}{{{kind}model="m"}} {float(value)}' in lines
        elif isinstance(mark, Internal):
            assert mark.reason
        else:
            assert status[name] == value
    for name in StatusStats.__struct_fields__:
        assert status[name] == getattr(stats, name)


def test_a_statistic_needs_only_its_declaration_to_have_a_series() -> None:
    class Later(Stats):
        added: Annotated[int, Exported("counter", "added", "Help.")] = 0

    (*_, last) = series(Later)
    assert [name for name, _ in last] == ["added"]
    assert len(series(Later)) == len(series(Stats)) + 1


def test_the_parts_of_a_worker_count_for_themselves_and_their_sum_is_sent() -> None:
    gauges = Gauges(running=2, heard_s=0.1)
    gauges.cache.prefix_hits += 3
    gauges.disk.disk_files += 4
    gauges.heard_s += 0.2
    gauges.speculator = Speculator()
    gauges.speculator.counts[DraftSource.LOOKUP].tokens = 9
    sent = gauges.snapshot()

    assert type(sent) is Stats
    assert (sent.running, sent.prefix_hits, sent.disk_files, sent.heard_s) == (2, 3, 4, 0.3)
    assert (sent.drafted_tokens, sent.draft_width) == (9, 1)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=Stats) == sent


@pytest.mark.parametrize("fields", [8, 36])
def test_the_statistics_of_an_older_worker_and_of_a_newer_one_are_read(fields: int) -> None:
    wire: list[Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(distinct()))
    older = msgspec.msgpack.decode(msgspec.msgpack.encode(wire[:fields]), type=Stats)
    newer = msgspec.msgpack.decode(msgspec.msgpack.encode([*wire, 7]), type=Stats)

    assert (older.running, older.memory_bytes, older.prefix_failures) == (101, 108, 0)
    assert newer == distinct()
