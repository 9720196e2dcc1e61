"""Peers that die, freeze, drain, restart and refuse under streams: none is lost, and no character comes twice."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gateway.config.remote_settings import PeerConfig
from gateway.config.settings import ModelConfig
from gateway.remote.peers import request_route
from tests.gateway.harness import Gateway, chat, events, running, until
from tests.gateway.remote.peers.pairs import NOWHERE, door, key_for
from tests.gateway.remote.peers.wires import Wire
from tests.support.pool import short_home, tokens

pytestmark = pytest.mark.anyio
STREAMS = 32
LENGTH = 120
SLOW = ["--step-ms", "10"]
# The files of the demo model make a form; another setting makes another one.
MODEL = ModelConfig(name="m", path="demo", max_running=STREAMS)
OTHER = ModelConfig(name="m", path="demo", dtype="float32", max_running=STREAMS)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@dataclass(slots=True)
class Far:
    """A peer behind a wire."""

    name: str
    gateway: Gateway
    wire: Wire
    home: Path
    key_file: Path

    @property
    def config(self) -> PeerConfig:
        return PeerConfig(name=self.name, url=self.wire.url, key_file=str(self.key_file))


@asynccontextmanager
async def far(name: str, model: ModelConfig = MODEL, options: Sequence[str] = SLOW) -> AsyncGenerator[Far]:
    with short_home() as home:
        key_file = key_for(home)
        async with running(home, options, [model]) as gateway, Wire.to(gateway.port) as wire:
            yield Far(name, gateway, wire, home, key_file)


async def stream(near: Gateway, **fields: Any) -> str:
    """The text of one streamed chat; an error that came in-band is in it."""
    reply = await near.client.post("/v1/chat/completions", json=chat(stream=True, max_tokens=LENGTH) | fields)
    assert reply.status_code == 200, reply.text
    *chunks, last = events(reply.text)
    if last != "[DONE]":
        chunks.append(last)
    return "".join(
        chunk["choices"][0]["delta"].get("content", "") if "choices" in chunk else f"<{chunk['error']['code']}>"
        for chunk in chunks
    )


async def streams(near: Gateway, count: int = STREAMS) -> list[asyncio.Task[str]]:
    """So many streams, each of which has begun somewhere."""
    tasks = [asyncio.create_task(stream(near)) for _ in range(count)]
    await until(lambda: near.metrics.models["m"].generation_tokens > 2 * count)
    return tasks


async def test_streams_of_a_peer_that_dies_go_on_at_another() -> None:
    async with AsyncExitStack() as stack:
        b, c = [await stack.enter_async_context(far(name)) for name in ("b", "c")]
        home = stack.enter_context(short_home())
        near = await stack.enter_async_context(door(home, b.config, c.config))
        tasks = await streams(near)
        assert b.gateway.link.in_flight, "the first of equal ones is asked first"

        b.wire.die()

        assert set(await asyncio.gather(*tasks)) == {tokens(LENGTH)}
        assert near.metrics.reroutes["b"] > 0
        await until(lambda: b.gateway.link.in_flight == 0 and near.link.in_flight == 0)
        # An answer to a poll that arrived before the death may be counted after the loss of the streams.
        await until(lambda: not near.app.services.fleet.nodes["b"].is_up)


@pytest.mark.soak
async def test_streams_of_a_peer_that_dies_go_on_here() -> None:
    async with AsyncExitStack() as stack:
        b = await stack.enter_async_context(far("b"))
        home = stack.enter_context(short_home())
        # It would take a while to load here, so the peer is asked.
        near = await stack.enter_async_context(door(home, b.config, models=[MODEL], options=SLOW))
        assert (await b.gateway.pool.ensure_ready("m")).is_ready
        await until(lambda: near.app.services.fleet.view("m").ready is not None)
        tasks = await streams(near, 4)
        assert b.gateway.link.in_flight == 4

        b.wire.die()

        assert set(await asyncio.gather(*tasks)) == {tokens(LENGTH)}
        assert near.pool.worker("m").is_ready


@pytest.mark.soak
async def test_streams_of_a_frozen_peer_go_on_elsewhere_and_are_not_doubled_when_it_thaws() -> None:
    async with AsyncExitStack() as stack:
        b, c = [await stack.enter_async_context(far(name)) for name in ("b", "c")]
        home = stack.enter_context(short_home())
        near = await stack.enter_async_context(door(home, b.config, c.config))
        tasks = await streams(near)
        b.wire.freeze()
        # What is asked now is not held up by it for longer than a peer has to accept.
        late = asyncio.create_task(stream(near))
        await until(lambda: c.gateway.link.in_flight > STREAMS // 2)

        b.wire.thaw()

        assert {*await asyncio.gather(*tasks), await late} == {tokens(LENGTH)}


async def test_a_peer_that_drains_is_asked_no_more_and_finishes_what_it_has() -> None:
    async with AsyncExitStack() as stack:
        b, c = [await stack.enter_async_context(far(name)) for name in ("b", "c")]
        home = stack.enter_context(short_home())
        near = await stack.enter_async_context(door(home, b.config, c.config))
        tasks = await streams(near, 4)
        b.gateway.app.drain()
        # At once, whether its status has told of it or not.
        late = [asyncio.create_task(stream(near)) for _ in range(8)]
        assert set(await asyncio.gather(*tasks, *late)) == {tokens(LENGTH)}
        await until(lambda: near.app.services.fleet.nodes["b"].problem == "it is draining")


@pytest.mark.soak
async def test_streams_wait_for_their_only_peer_to_come_back() -> None:
    async with AsyncExitStack() as stack:
        b = await stack.enter_async_context(far("b"))
        again = await stack.enter_async_context(far("b"))
        # The peer that comes back has the same keys.
        (again.home / "keys" / "keys.json").write_bytes((b.home / "keys" / "keys.json").read_bytes())
        home = stack.enter_context(short_home())
        near = await stack.enter_async_context(door(home, b.config))
        tasks = await streams(near, 8)

        b.wire.die()
        await until(lambda: near.metrics.reroutes["b"] == 8)
        b.wire.target = again.gateway.port

        assert set(await asyncio.gather(*tasks)) == {tokens(LENGTH)}


async def test_a_stream_ends_with_an_error_where_no_peer_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_route, "FAILOVER_TIMEOUT_S", 0.3)
    async with AsyncExitStack() as stack:
        b = await stack.enter_async_context(far("b"))
        home = stack.enter_context(short_home())
        near = await stack.enter_async_context(door(home, b.config))
        tasks = await streams(near, 2)
        b.wire.die()
        for text in await asyncio.gather(*tasks):
            assert text.endswith("<worker_died>")
            assert tokens(LENGTH).startswith(text.removesuffix("<worker_died>"))
        reply = await near.client.post("/v1/chat/completions", json=chat())
        assert reply.status_code == 404, "a model that only a lost peer had is no model any more"


async def test_a_stream_is_never_spliced_with_another_model_of_the_same_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_route, "FAILOVER_TIMEOUT_S", 0.3)
    async with AsyncExitStack() as stack:
        b = await stack.enter_async_context(far("b"))
        c = await stack.enter_async_context(far("c", OTHER))
        home = stack.enter_context(short_home())
        near = await stack.enter_async_context(door(home, b.config, c.config))
        (task,) = await streams(near, 1)
        assert c.gateway.link.in_flight == 0
        b.wire.die()
        assert (await task).endswith("<worker_died>")
        # A name means the model of the first peer that has it: of what is there now, the other one.
        assert await stream(near) == tokens(LENGTH)


async def test_a_peer_that_was_never_there_holds_up_nothing() -> None:
    async with AsyncExitStack() as stack:
        c = await stack.enter_async_context(far("c", options=["--step-ms", "1"]))
        home = stack.enter_context(short_home())
        absent = PeerConfig(name="b", url=NOWHERE, key_file=str(c.key_file))
        near = await stack.enter_async_context(door(home, absent, c.config))
        assert set(await asyncio.gather(*(stream(near) for _ in range(4)))) == {tokens(LENGTH)}


@pytest.mark.soak
async def test_a_peer_whose_worker_dies_resumes_by_itself() -> None:
    async with AsyncExitStack() as stack:
        b = await stack.enter_async_context(far("b"))
        home = stack.enter_context(short_home())
        near = await stack.enter_async_context(door(home, b.config))
        tasks = await streams(near, 4)
        b.gateway.pool.worker("m").kill()
        assert set(await asyncio.gather(*tasks)) == {tokens(LENGTH)}
        assert near.metrics.reroutes["b"] == 0


async def test_a_wrong_key_is_told_and_the_model_is_served_elsewhere() -> None:
    async with AsyncExitStack() as stack:
        b, c = [await stack.enter_async_context(far(name)) for name in ("b", "c")]
        home = stack.enter_context(short_home())
        near = await stack.enter_async_context(door(home, b.config, c.config))
        b.key_file.write_text("sk-mlxd-wrong\n")
        assert set(await asyncio.gather(*(stream(near) for _ in range(4)))) == {tokens(LENGTH)}
        await until(lambda: near.app.services.fleet.nodes["b"].problem == "its key is refused there")


async def test_a_model_that_cannot_be_loaded_here_is_served_by_a_peer() -> None:
    async with AsyncExitStack() as stack:
        b = await stack.enter_async_context(far("b", options=["--step-ms", "1"]))
        home = stack.enter_context(short_home())
        broken = ["--exit-on-load", "66"]
        near = await stack.enter_async_context(door(home, b.config, models=[MODEL], options=broken))
        assert await stream(near) == tokens(LENGTH)
        assert await stream(near) == tokens(LENGTH)
