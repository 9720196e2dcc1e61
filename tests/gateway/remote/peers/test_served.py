"""Models of a peer are served behind this gateway's names, as messages of the protocol."""

import json
from base64 import b64encode
from collections.abc import AsyncGenerator
from pathlib import Path

import httpx
import pytest

from gateway.access.key import Key
from gateway.access.key_file import KeyFile
from gateway.config.settings import ModelConfig, SamplingDefaults, ServerConfig
from gateway.state_dir.home_paths import keys_path
from tests.gateway.harness import Gateway, chat, events, running, until
from tests.gateway.remote.peers.pairs import door, key_for, peer
from tests.support.pictures import encoded, halves
from tests.support.pool import short_home, tokens

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def pair() -> AsyncGenerator[tuple[Gateway, Gateway]]:
    """A door, and its peer with the model `m`."""
    there = ModelConfig(name="m", path="m", aliases=("big", "big-*"), sampling=SamplingDefaults(max_tokens=7))
    with short_home() as home, short_home() as far_home:
        key_file = key_for(far_home)
        async with running(far_home, ["--step-ms", "1"], [there]) as far, door(home, peer(far, key_file)) as near:
            yield near, far


async def test_a_chat_with_a_model_of_a_peer_is_answered_and_says_by_whom(pair: tuple[Gateway, Gateway]) -> None:
    near, far = pair
    reply = await near.client.post("/v1/chat/completions", json=chat())
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["message"]["content"] == tokens(5)
    assert reply.json()["usage"]["completion_tokens"] == 5
    assert reply.headers["x-mlxd-served-by"] == "b"
    assert near.metrics.forwarded["b", "only"] >= 1
    assert far.metrics.models["m"].generation_tokens >= 5


@pytest.mark.parametrize("name", ["m", "big", "b/m", "b/big"])
async def test_a_model_of_a_peer_has_its_name_its_aliases_and_the_peer_before_them(
    pair: tuple[Gateway, Gateway], name: str
) -> None:
    reply = await pair[0].client.post("/v1/chat/completions", json=chat(model=name, stream=True))
    texts = [event["choices"][0]["delta"].get("content", "") for event in events(reply.text)[:-1]]
    assert "".join(texts) == tokens(5)


async def test_choices_and_other_dialects_travel_too(pair: tuple[Gateway, Gateway]) -> None:
    near, _ = pair
    many = await near.client.post("/v1/chat/completions", json=chat(n=3))
    assert [choice["message"]["content"] for choice in many.json()["choices"]] == [tokens(5)] * 3
    message = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
    assert (await near.client.post("/v1/messages", json=message)).json()["content"][0]["text"] == tokens(4)
    response = await near.client.post("/v1/responses", json={"model": "m", "input": "hi", "max_output_tokens": 3})
    assert response.json()["output"][0]["content"][0]["text"] == tokens(3)


async def test_a_peers_model_is_found_loaded_and_asked_by_ollamas_api(pair: tuple[Gateway, Gateway]) -> None:
    near, _ = pair
    assert "m" in [model["name"] for model in (await near.client.get("/api/tags")).json()["models"]]
    shown = await near.client.post("/api/show", json={"model": "m:latest"})
    assert (shown.status_code, shown.json()["capabilities"]) == (200, ["completion"])
    body = {"model": "m", "stream": False, "options": {"num_predict": 3}}
    loaded = await near.client.post("/api/generate", json=body)
    assert loaded.json()["done_reason"] == "load"
    asked = await near.client.post("/api/generate", json=body | {"prompt": "hi", "raw": True})
    assert asked.json()["response"] == tokens(3)
    assert (await near.client.post("/api/generate", json=body | {"keep_alive": 0})).status_code == 404
    assert (
        await near.client.post("/infill", json={"model": "m", "input_suffix": "x", "n_predict": 2})
    ).status_code == 200


async def test_defaults_of_a_request_are_those_of_the_peer(pair: tuple[Gateway, Gateway]) -> None:
    reply = await pair[0].client.post("/v1/chat/completions", json=chat() | {"max_tokens": None})
    assert reply.json()["choices"][0]["message"]["content"] == tokens(7)


async def test_questions_about_tokens_are_put_to_the_peer(pair: tuple[Gateway, Gateway]) -> None:
    near, _ = pair
    counted = await near.client.post("/tokenize", json={"model": "m", "prompt": "hi"})
    assert (counted.status_code, counted.json()["count"]) == (200, 3)
    text = await near.client.post("/detokenize", json={"model": "m", "tokens": [0, 1]})
    assert text.json()["prompt"] == tokens(2)


async def test_models_of_peers_are_listed_behind_those_of_the_door(pair: tuple[Gateway, Gateway]) -> None:
    near, _ = pair
    await near.client.post("/v1/chat/completions", json=chat())
    # The peer tells once a second what it has loaded.
    await until(lambda: near.app.services.fleet.view("m").ready is not None)
    listed = (await near.client.get("/v1/models")).json()["data"]
    assert [(card["id"], card["aliases"]) for card in listed] == [("own", []), ("m", ["big"])]
    card = (await near.client.get("/v1/models/b/m")).json()
    assert (card["id"], card["context_length"]) == ("b/m", 1 << 20)


async def test_a_refusal_by_the_worker_of_the_peer_is_that_of_the_request(pair: tuple[Gateway, Gateway]) -> None:
    reply = await pair[0].client.post("/v1/completions", json={"model": "m", "prompt": "refused", "max_tokens": 3})
    assert reply.status_code == 400
    assert reply.json()["error"]["message"] == "refused"


async def test_an_unknown_name_is_unknown_with_peers_as_well(pair: tuple[Gateway, Gateway]) -> None:
    for name in ("nope", "b/nope", "c/m"):
        assert (await pair[0].client.post("/v1/chat/completions", json=chat(model=name))).status_code == 404


async def test_a_client_that_leaves_frees_the_peer(pair: tuple[Gateway, Gateway]) -> None:
    near, far = pair
    body = chat(stream=True) | {"max_tokens": 1_000_000}
    async with near.client.stream("POST", "/v1/chat/completions", json=body) as reply:
        await anext(reply.aiter_raw())
        await until(lambda: far.link.in_flight == 1)
    await until(lambda: far.link.in_flight == 0 and near.link.in_flight == 0)


async def test_a_key_of_the_door_reaches_models_of_peers_by_its_patterns(tmp_path: Path) -> None:
    with short_home() as home, short_home() as far_home:
        async with running(far_home) as far, door(home, peer(far, key_for(far_home))) as near:
            keys = KeyFile(keys_path(home))
            fields = {"prefix": "", "salt": "", "hash": ""}
            _, other = keys.create(Key(name="other", models=("own",), **fields))  # type: ignore[arg-type]
            _, right = keys.create(Key(name="right", models=("m",), **fields))  # type: ignore[arg-type]
            for secret, status in ((other, 404), (right, 200)):
                headers = {"x-api-key": secret}
                reply = await near.client.post("/v1/chat/completions", json=chat(), headers=headers)
                assert reply.status_code == status
            assert near.metrics.keys["right"].generation_tokens == 5
            # There the door is one key, whichever of its own it serves.
            assert far.metrics.keys["door"].generation_tokens == 5


async def test_salts_are_the_peers_own_and_never_shared() -> None:
    """A worker there is told neither the salts of the door's keys, nor any that another key there has."""
    with short_home() as home, short_home() as far_home:
        key_file = key_for(far_home)
        async with running(far_home, worker="revealing") as far, door(home, peer(far, key_file)) as near:
            keys = KeyFile(keys_path(home))
            seen: list[str] = []
            for name in ("ann", "bob"):
                _, secret = keys.create(Key(name=name, prefix="", salt="", hash=""))
                reply = await near.client.post("/v1/chat/completions", json=chat(), headers={"x-api-key": secret})
                seen.append(json.loads(reply.json()["choices"][0]["message"]["content"])["cache_salt"])
            own = {key.cache_salt for key in keys.read()}
            (theirs,) = (key.cache_salt for key in KeyFile(keys_path(far_home)).read())
            assert seen[0] != seen[1]
            for salt in seen:
                assert salt.startswith(f"{theirs}\0"), "within the cache of the door's key"
                assert not any(each in salt for each in own)


async def test_a_large_prompt_and_its_choices_travel_whole(pair: tuple[Gateway, Gateway]) -> None:
    near, _ = pair
    reply = await near.client.post("/v1/chat/completions", json=chat("x" * 2_000_000, n=2))
    assert [choice["message"]["content"] for choice in reply.json()["choices"]] == [tokens(5)] * 2


async def test_the_admin_api_explains_where_a_request_would_go(pair: tuple[Gateway, Gateway]) -> None:
    near, _ = pair
    transport = httpx.ASGITransport(app=near.admin)
    async with httpx.AsyncClient(transport=transport, base_url="http://mlxd") as owner:
        chosen = (await owner.get("/v1/route", params={"model": "big", "tokens": 4000})).json()
        assert (chosen["model"], chosen["reason"]) == ("m", "only")
        assert [(place["name"], place["is_chosen"]) for place in chosen["places"]] == [("b", True)]
        here = (await owner.get("/v1/route", params={"model": "own"})).json()
        assert [(place["name"], place["is_chosen"]) for place in here["places"]] == [("", True), ("b", False)]
        assert here["places"][1]["objection"].startswith("does not serve it")
        peers = (await owner.get("/v1/route")).json()
        assert [(place["name"], place["state"]) for place in peers["places"]] == [("b", "up")]
        assert (await owner.get("/v1/route", params={"model": "nope"})).status_code == 404
        assert (await owner.get("/v1/route", params={"model": "m", "tokens": "²"})).status_code == 400


async def test_a_picture_travels_in_the_request_and_is_counted_at_the_door() -> None:
    picture = encoded(halves(8, 6))
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{b64encode(picture).decode()}"}}
    words = {"type": "text", "text": "see"}
    with short_home() as home, short_home() as far_home:
        key_file = key_for(far_home)
        async with running(far_home, worker="seeing") as far, door(home, peer(far, key_file)) as near:
            body = chat(messages=[{"role": "user", "content": [words, image]}])
            reply = await near.client.post("/v1/chat/completions", json=body)
            assert (reply.status_code, reply.headers["x-mlxd-served-by"]) == (200, "b"), reply.text
            given = json.loads(reply.json()["choices"][0]["message"]["content"])
            assert given["messages"][0]["content"] == [words, {"type": "image", "media": 0}]
            assert [(each["kind"], bytes.fromhex(each["data"])) for each in given["media"]] == [("image", picture)]
            assert reply.json()["usage"]["prompt_tokens"] == 3 + 16
            # A model that only takes text is not sent one.
            refused = await near.client.post("/v1/chat/completions", json=body | {"model": "own"})
            assert refused.status_code == 400


async def test_a_node_with_a_name_tells_it_and_one_without_tells_nothing(pair: tuple[Gateway, Gateway]) -> None:
    assert "x-mlxd-node" not in (await pair[0].client.get("/livez")).headers
    with short_home() as home:
        async with running(home, server=ServerConfig(node="studio1")) as gateway:
            assert (await gateway.client.get("/v1/models")).headers["x-mlxd-node"] == "studio1"
