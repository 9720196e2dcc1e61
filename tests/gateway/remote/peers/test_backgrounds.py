"""Background responses from models of peers, over a restart of the door."""

from typing import Any

import pytest

from gateway.api.responses import resumption
from gateway.config.settings import ModelConfig
from tests.gateway.harness import Gateway, running, until
from tests.gateway.remote.peers.pairs import door, key_for, peer
from tests.support.pool import short_home, tokens

pytestmark = pytest.mark.anyio

PATH = "/v1/responses"
LENGTH = 300
MODEL = ModelConfig(name="m", path="demo")
OTHER = ModelConfig(name="m", path="demo", dtype="float32")
SLOW = ["--step-ms", "5"]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def begun(near: Gateway) -> str:
    """The id of one that has tokens of the peer, and is left to the next door."""
    await until(lambda: near.app.services.fleet.nodes["b"].model("m") is not None)
    await until(lambda: bool(getattr(near.app.services.fleet.nodes["b"].model("m"), "form", "")))
    body = {"model": "m", "input": "hi", "max_output_tokens": LENGTH, "background": True}
    made = (await near.client.post(PATH, json=body)).json()["id"]
    async with near.client.stream("GET", f"{PATH}/{made}?stream=true") as stream:
        async for line in stream.aiter_lines():
            if line == "event: response.output_text.delta":
                near.app.drain()
                near.app.leave()
                return made
    raise AssertionError("it ended without a token")


async def ended(near: Gateway, made: str) -> Any:
    last: Any = {}

    async def look() -> bool:
        nonlocal last
        last = (await near.client.get(f"{PATH}/{made}")).json()
        return last["status"] not in ("queued", "in_progress")

    while not await look():
        await until(lambda: near.app.services.admission.inside("m") == 0)
    return last


async def test_a_response_of_a_peers_model_goes_on_after_a_restart_of_the_door() -> None:
    with short_home() as home, short_home() as far_home:
        key_file = key_for(far_home)
        async with running(far_home, SLOW, [MODEL]) as far:
            async with door(home, peer(far, key_file)) as near:
                made = await begun(near)
            async with door(home, peer(far, key_file)) as near:
                last = await ended(near, made)
    assert last["error"] is None
    assert last["output"][0]["content"][0]["text"] == tokens(LENGTH)


@pytest.mark.soak
async def test_a_response_does_not_go_on_at_a_peer_with_another_form_of_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resumption, "PEERS_TIMEOUT_S", 2.0)
    with short_home() as home, short_home() as far_home:
        key_file = key_for(far_home)
        async with running(far_home, SLOW, [MODEL]) as far, door(home, peer(far, key_file)) as near:
            made = await begun(near)
        async with running(far_home, SLOW, [OTHER]) as far, door(home, peer(far, key_file)) as near:
            last = await ended(near, made)
    assert last["status"] == "failed"
    assert "form" in last["error"]["message"]
    text = last["output"][0]["content"][0]["text"]
    assert tokens(LENGTH).startswith(text)
    assert len(text) < len(tokens(LENGTH))
