"""The feed of the page: its events, its viewers, and what it does without any."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from msgspec import structs

from gateway.config.settings import ModelConfig, UiConfig
from gateway.http import connection_limits
from gateway.telemetry.logs import OURS
from gateway.web import feed as feed_module
from gateway.web.feed import EVENT_LINES_MAX, VIEWERS_MAX, Feed, LogTail
from tests.gateway.harness import Gateway, chat, running, until
from tests.gateway.web.visitors import log_in
from tests.support.scale import patient

pytestmark = pytest.mark.anyio

MODELS = [ModelConfig(name="a", path="a"), ModelConfig(name="b", path="b")]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", autouse=True)
def fast() -> AsyncIterator[None]:
    """Twenty looks a second."""
    patch = pytest.MonkeyPatch()
    patch.setattr(feed_module, "INTERVAL_S", 0.05)
    patch.setattr(connection_limits, "WRITE_TIMEOUT_S", 2.0)
    yield
    patch.undo()


@pytest.fixture(scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Gateway, None]:
    home = tmp_path_factory.mktemp("h")
    async with running(home, ["--step-ms", "5"], MODELS) as running_gateway:
        yield running_gateway


def feed_of(gateway: Gateway) -> Feed:
    return gateway.app.backend.feed


class Viewer:
    """One open feed."""

    def __init__(self, lines: AsyncIterator[str]) -> None:
        self._lines = lines

    async def next(self, *kinds: str) -> tuple[str, Any]:
        """The next event of one of these kinds."""
        name = ""
        async with asyncio.timeout(patient(30)):
            async for line in self._lines:
                if line.startswith("event: "):
                    name = line[7:]
                elif line.startswith("data: ") and (not kinds or name in kinds):
                    return name, json.loads(line[6:])
        raise AssertionError(f"no {kinds} came")


@asynccontextmanager
async def viewing(gateway: Gateway, session: dict[str, str], query: str = "") -> AsyncGenerator[Viewer, None]:
    async with (
        httpx2.AsyncClient(base_url=gateway.url, timeout=patient(60)) as client,
        client.stream("GET", f"/ui/api/feed{query}", headers=session) as answer,
    ):
        assert answer.status_code == 200
        yield Viewer(answer.aiter_lines())


async def test_a_viewer_gets_a_snapshot_and_then_what_changes(gateway: Gateway) -> None:
    await gateway.pool.unload("a")
    async with viewing(gateway, await log_in(gateway)) as viewer:
        kind, snapshot = await viewer.next()
        assert kind == "snapshot"
        assert [model["name"] for model in snapshot["models"]] == ["a", "b"]
        assert snapshot["memory"]["budget_bytes"] > 0
        asking = asyncio.create_task(gateway.client.post("/v1/chat/completions", json=chat(model="a", max_tokens=200)))
        states = [(await viewer.next("state"))[1] for _ in range(3)]
        assert [(state["model"], state["state"]) for state in states] == [
            ("a", "starting"), ("a", "loading"), ("a", "ready"),
        ]  # fmt: skip
        while True:
            tick = (await viewer.next("tick"))[1]
            if any(request["state"] == "decode" for request in tick.get("requests") or ()):
                break
        assert {model["name"] for model in tick.get("models", ())} <= {"a"}
        await asking
        while (await viewer.next("tick"))[1].get("requests") != []:
            pass


async def test_what_stays_as_it_is_is_not_sent_again(gateway: Gateway) -> None:
    await gateway.pool.load("a")
    await until(lambda: not gateway.app.services.requests.views())
    async with viewing(gateway, await log_in(gateway)) as viewer:
        await viewer.next("snapshot")
        for change in (gateway.pool.pin, gateway.pool.unpin, gateway.pool.pin):
            await change("a")
            tick = (await viewer.next("tick"))[1]
            assert "b" not in {model["name"] for model in tick.get("models", ())}
            assert not {"pulls", "is_draining", "requests", "removed"} & tick.keys()
        await gateway.pool.unpin("a")


async def same_tick(one: Viewer, other: Viewer) -> list[Any]:
    """The next tick that both viewers get: one of them may have begun a tick earlier."""
    ticks = [(await viewer.next("tick"))[1] for viewer in (one, other)]
    while ticks[0]["time"] != ticks[1]["time"]:
        late = int(ticks[0]["time"] > ticks[1]["time"])
        ticks[late] = (await (one, other)[late].next("tick"))[1]
    return ticks


async def test_an_event_is_encoded_once_for_all_viewers(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    session = await log_in(gateway)
    encoded: list[object] = []
    encode = feed_module._encode  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(feed_module, "_encode", lambda data: encoded.append(data) or encode(data))
    async with viewing(gateway, session) as one, viewing(gateway, session) as other:
        await one.next("snapshot")
        await other.next("snapshot")
        encoded.clear()
        await gateway.pool.pin("b")
        pinned = await same_tick(one, other)
        await gateway.pool.unpin("b")
        unpinned = await same_tick(one, other)

    assert pinned[0] == pinned[1]
    assert unpinned[0] == unpinned[1]
    assert 2 <= len(encoded) <= 8


async def test_without_viewers_nothing_works(gateway: Gateway) -> None:
    async with viewing(gateway, await log_in(gateway), "?log=1") as viewer:
        await viewer.next("snapshot")
        tasks = len(gateway.app.services.tasks)
        assert gateway.metrics.on_state is not None

    await until(lambda: feed_of(gateway).viewers == 0)
    await until(lambda: len(gateway.app.services.tasks) == tasks - 1)
    assert gateway.metrics.on_state is None
    assert not any(isinstance(handler, LogTail) for name in OURS for handler in logging.getLogger(name).handlers)
    async with viewing(gateway, await log_in(gateway)) as viewer:
        await viewer.next("snapshot")
        await gateway.pool.pin("b")
        await viewer.next("tick")
        await gateway.pool.unpin("b")


async def test_lines_of_the_log_come_to_who_asks_and_are_bounded(gateway: Gateway) -> None:
    session = await log_in(gateway)
    log = logging.getLogger("gateway.test")
    async with viewing(gateway, session, "?log=1") as viewer, viewing(gateway, session) as other:
        await viewer.next("snapshot")
        await other.next("snapshot")
        for number in range(EVENT_LINES_MAX + 30):
            log.warning("line %d\n<script>", number, extra={"fields": {"odd": object()}})
        lines: list[Any] = []
        dropped = 0
        while len(lines) + dropped < EVENT_LINES_MAX + 30:
            told = (await viewer.next("log"))[1]
            assert len(told["lines"]) <= EVENT_LINES_MAX
            lines += [line for line in told["lines"] if line["logger"] == "gateway.test"]
            dropped += told["dropped"]
        await gateway.pool.pin("b")
        kind, _ = await other.next("tick", "log")
        await gateway.pool.unpin("b")

    assert kind == "tick"
    assert dropped >= 30
    assert lines[0]["message"] == "line 0\n<script>"


async def test_a_session_that_is_revoked_ends_its_feed(gateway: Gateway) -> None:
    async with viewing(gateway, await log_in(gateway)) as viewer:
        await viewer.next("snapshot")
        gateway.app.backend.gate.sessions.revoke()
        assert await viewer.next("end") == ("end", {})
        with pytest.raises(AssertionError, match="no"):
            await viewer.next()


async def test_a_reload_that_changes_who_may_administer_ends_every_feed(gateway: Gateway) -> None:
    live = gateway.app.services.live
    before = live.config
    async with viewing(gateway, await log_in(gateway)) as viewer:
        await viewer.next("snapshot")
        live.apply(structs.replace(before, ui=UiConfig("off")))
        try:
            assert await viewer.next("end") == ("end", {})
        finally:
            live.apply(before)


async def test_a_viewer_that_does_not_read_is_cut_off_and_holds_up_no_other(gateway: Gateway) -> None:
    session = await log_in(gateway)
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=1024)
    head = "".join(f"{name}: {value}\r\n" for name, value in session.items())
    writer.write(f"GET /ui/api/feed?log=1 HTTP/1.1\r\nhost: 127.0.0.1:{gateway.port}\r\n{head}\r\n".encode())
    await until(lambda: feed_of(gateway).viewers == 1)
    log, stops = logging.getLogger("gateway.test"), asyncio.Event()

    async def fill() -> None:
        while not stops.is_set():
            for _ in range(EVENT_LINES_MAX):
                log.warning("x" * 20_000)
            await asyncio.sleep(0.01)

    filling = asyncio.create_task(fill())
    async with viewing(gateway, session) as viewer:
        await viewer.next("snapshot")
        await until(lambda: feed_of(gateway).viewers == 1)
        stops.set()
        await filling
        await gateway.pool.pin("b")
        await viewer.next("tick")
        await gateway.pool.unpin("b")
    writer.close()
    del reader


async def test_viewers_are_bounded(gateway: Gateway) -> None:
    session = await log_in(gateway)
    feed = feed_of(gateway)
    await until(lambda: feed.viewers == 0)
    async with asyncio.timeout(patient(60)):
        reading = [asyncio.create_task(_first(gateway, session)) for _ in range(VIEWERS_MAX)]
        await until(lambda: feed.viewers == VIEWERS_MAX)
        refused = await gateway.client.get("/ui/api/feed", headers=session)
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)

    assert refused.status_code == 429
    await until(lambda: feed.viewers == 0)


async def _first(gateway: Gateway, session: dict[str, str]) -> None:
    async with viewing(gateway, session) as viewer:
        await viewer.next("end")


async def test_the_feed_ends_with_the_daemon(tmp_path: Path) -> None:
    async with running(tmp_path) as gateway, viewing(gateway, await log_in(gateway)) as viewer:
        await viewer.next("snapshot")
        await gateway.app.finish(patient(5))
        assert (await viewer.next("end"))[0] == "end"
