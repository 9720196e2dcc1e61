"""A worker's specification is made of its model's settings in one place: for the daemon, `verify` and `calibrate`."""

import asyncio
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import fields, replace

from gateway.config.settings import (
    CacheConfig,
    Config,
    GroupConfig,
    MediaConfig,
    ModelConfig,
    ServerConfig,
)
from gateway.config.worker_spec_and_group import worker_spec
from gateway.ctl.calibrate import findings
from gateway.ctl.verify import in_process
from gateway.link.link import WorkerLink
from gateway.workers.pool import Pool
from protocol.spec import WorkerSpec
from tests.support.machine import Recorder
from tests.support.pool import short_home

# Of one start: `epoch`, `memory_bytes` and `rank`, and how long a worker outlives its gateway.
UNSET = {"epoch", "down", "up", "memory_bytes", "rank", "orphan_grace_s", "orphan_max_s"}
# Without a setting.
UNSET |= {"media_pixels", "prefill_chunk", "batching", "expert_cache_bytes", "media_count"}
MODEL = ModelConfig(
    name="m",
    path="p",
    dtype="bfloat16",
    context=77,
    max_running="auto",
    deterministic=True,
    speculate="off",
    draft="d",
    sparse_prefill=0.5,
    kind="text",
    matryoshka=True,
    adapters={"a": "folder"},
    trust_remote_code=True,
    parser="hermes",
    chat_template="{{ 1 }}",
    cache=CacheConfig(1 << 30, 1 << 31),
    kv_bytes=1 << 29,
    kv_bits=8,
    experts="disk",
    kv_events="tcp://127.0.0.1:1",
    keep_warm_s=300.0,
)


@pytest.fixture
def config() -> Iterator[Config]:
    """Settings of which each differs from its default as far as a worker is told of it."""
    with short_home() as home:
        media = MediaConfig(max_size_bytes=2048)
        yield Config(home, ServerConfig(log_level="debug"), {"m": MODEL}, home / "mlxd.toml", media=media)


def told(spec: WorkerSpec) -> set[str]:
    """Fields that differ from their defaults."""
    return {field.name for field in fields(spec) if getattr(spec, field.name) != field.default}


def test_a_specification_has_every_field_that_settings_decide(config: Config) -> None:
    spec = worker_spec(config, MODEL, "ipc://down", "ipc://up")
    group = worker_spec(config, replace(MODEL, group=GroupConfig(("local", "local"), "pipeline", "ring")))
    assert group.group is not None
    assert group.group.nodes == ("local", "local")
    assert not group.disk_cache_dir
    everything = {field.name for field in fields(WorkerSpec)}
    assert told(spec) | {"group"} | UNSET == everything
    assert (spec.down, spec.up) == ("ipc://down", "ipc://up")
    assert spec.kv_events_replay == "tcp://127.0.0.1:2"
    assert spec.kv_events_topic == f"kv@{socket.gethostname()}@m"
    assert (spec.max_running, spec.log_level, spec.sparse_from) == (0, "debug", 8192)


def test_settings_as_they_come_leave_a_specification_as_its_defaults_are(config: Config) -> None:
    config = replace(config, server=ServerConfig(), media=MediaConfig())
    spec = worker_spec(config, ModelConfig(name="m", path="p"))
    usual = {"name", "path", "epoch", "down", "up", "max_waiting"}
    assert told(spec) == {*usual, "disk_cache_dir", "disk_cache_bytes", "disk_cache_tokens"}


def verified(config: Config) -> None:
    assert list(in_process(config, MODEL, 1)) == []


def calibrated(config: Config) -> None:
    assert list(findings(config, MODEL, 1.0)) == []


@pytest.mark.parametrize("run", [verified, calibrated])
def test_programs_beside_the_daemon_are_told_what_its_workers_are(
    run: Callable[[Config], None], config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpreter, received = tmp_path / "python", tmp_path / "spec.json"
    interpreter.write_text(f"#!/bin/sh\ncat > {received}\n")
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    run(config)
    assert msgspec.json.decode(received.read_bytes(), type=WorkerSpec) == worker_spec(config, MODEL)


def test_workers_of_the_daemon_are_told_the_same(config: Config) -> None:
    async def scenario() -> None:
        link = WorkerLink(config.run_dir, Recorder())
        pool = Pool(config, link, Recorder(), command=lambda _spec: [sys.executable, "-c", ""])
        await pool.start()
        try:
            assert pool.worker("m").spec == worker_spec(config, MODEL, link.down, link.up)
        finally:
            await pool.stop(0.0)

    asyncio.run(scenario())
