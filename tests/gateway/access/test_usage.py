import asyncio
import logging
import stat
import threading
from contextlib import suppress
from pathlib import Path

import pytest

import gateway.access.usage
import gateway.state_dir
from gateway.access.key import Key, KeyFile
from gateway.access.usage import UsageFile
from gateway.disk_and_clock import Disk
from gateway.state_dir import write_private
from gateway.telemetry.metrics import Metrics
from tests.gateway.harness import chat, running
from tests.support.scale import patient


def metrics_of(*names: str) -> Metrics:
    metrics = Metrics()
    for name in names:
        metrics.key(name)
    return metrics


def test_what_was_counted_goes_on_after_a_restart_and_so_does_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "state" / "usage.json"
    before = metrics_of("alice")
    numbers = before.key("alice")
    numbers.requests["200"] = 3
    numbers.rejections["tokens"] = 1
    numbers.prompt_tokens, numbers.generation_tokens = 50, 7
    UsageFile(path, before, lambda: 1000.0).close()

    after = metrics_of("alice")
    usage = UsageFile(path, after, lambda: 2000.0)
    found = after.key("alice")
    assert usage.since == 1000.0
    assert (found.requests, found.rejections) == ({"200": 3}, {"tokens": 1})
    assert (found.prompt_tokens, found.generation_tokens) == (50, 7)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_key_that_is_gone_takes_its_counters_with_it(tmp_path: Path) -> None:
    path = tmp_path / "usage.json"
    before = metrics_of("alice", "bob")
    before.key("bob").prompt_tokens = 5
    UsageFile(path, before).close()
    after = metrics_of("alice")
    UsageFile(path, after).close()

    assert "bob" not in after.keys
    assert b"bob" not in path.read_bytes()


def test_without_keys_there_is_no_file(tmp_path: Path) -> None:
    UsageFile(tmp_path / "usage.json", metrics_of()).close()

    assert not (tmp_path / "usage.json").exists()


def test_a_damaged_file_is_begun_anew_and_said_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "usage.json").write_text("{")
    usage = UsageFile(tmp_path / "usage.json", metrics_of("alice"), lambda: 5.0)

    assert usage.since == 5.0
    assert "usage is counted from now on" in caplog.text


def test_a_file_that_cannot_be_written_is_said_once_and_costs_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "state").write_text("no folder")
    metrics = metrics_of("alice")
    usage = UsageFile(tmp_path / "state" / "usage.json", metrics)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            metrics.key("alice").prompt_tokens += 1
            usage.close()

    assert caplog.text.count("usage is not kept") == 1


@pytest.mark.anyio
async def test_a_write_that_is_under_way_at_the_end_never_lands_on_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, metrics = tmp_path / "usage.json", metrics_of("alice")
    begun, may_end = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def write(path: Path, data: bytes, disk: Disk) -> None:
        if not begun.is_set():
            loop.call_soon_threadsafe(begun.set)
            may_end.wait(patient(10))
        write_private(path, data, disk)

    monkeypatch.setattr(gateway.access.usage, "PERIOD_S", 0)
    monkeypatch.setattr(gateway.state_dir, "write_private", write)
    usage = UsageFile(path, metrics)
    metrics.key("alice").prompt_tokens = 1
    task = asyncio.create_task(usage.run())
    await begun.wait()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    metrics.key("alice").prompt_tokens = 2
    threading.Timer(0.1, may_end.set).start()
    usage.close()
    await loop.shutdown_default_executor()

    again = metrics_of("alice")
    UsageFile(path, again)
    assert again.key("alice").prompt_tokens == 2


def test_a_private_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_private(path, b"old")
    with pytest.raises(TypeError):
        write_private(path, "not bytes")  # pyright: ignore[reportArgumentType]

    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


@pytest.mark.anyio
async def test_a_gateway_goes_on_counting_where_the_one_before_it_ended(tmp_path: Path) -> None:
    _, secret = KeyFile(tmp_path / "keys" / "keys.json").create(Key(name="alice", prefix="", salt="", hash=""))
    for _ in range(2):
        async with running(tmp_path, ["--step-ms", "1"]) as gateway:
            headers = {"authorization": f"Bearer {secret}"}
            await gateway.client.post("/v1/chat/completions", json=chat(), headers=headers)
            numbers = gateway.metrics.key("alice")

    assert numbers.requests["200"] == 2
    assert numbers.generation_tokens == 10


@pytest.mark.anyio
async def test_a_debt_of_the_first_key_is_kept_by_the_daemon_that_began_without_keys(tmp_path: Path) -> None:
    path = "/v1/chat/completions"
    key = Key(name="alice", prefix="", salt="", hash="", tpm=1)
    async with running(tmp_path, ["--step-ms", "1"]) as gateway:
        assert (await gateway.client.post(path, json=chat())).status_code == 200
        headers = {"authorization": f"Bearer {KeyFile(tmp_path / 'keys' / 'keys.json').create(key)[1]}"}
        first = await gateway.client.post(path, json=chat(), headers=headers)
        second = await gateway.client.post(path, json=chat(), headers=headers)
        assert (first.status_code, second.status_code) == (200, 429)
    async with running(tmp_path, ["--step-ms", "1"]) as gateway:
        assert (await gateway.client.post(path, json=chat(), headers=headers)).status_code == 429
