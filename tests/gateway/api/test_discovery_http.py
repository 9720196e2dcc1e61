"""Context and shape of models, where clients of llama.cpp look for them."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from gateway.access.key import Key, KeyFile
from gateway.config.settings import ModelConfig, ProfileConfig, SamplingDefaults, ServerConfig
from tests.gateway.harness import Gateway, chat, running
from tests.support.published import check_answer
from tests.support.scale import patient

pytestmark = pytest.mark.anyio

# Their files are the demo model's; their workers are scripted.
MODELS = (
    ModelConfig(name="m", path="demo", aliases=("gpt-4o",), context=2048, profiles={"brief": ProfileConfig()}),
    ModelConfig(name="gone", path="nobody/not-here", max_running=3),
)


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncGenerator[Gateway, None]:
    async with running(tmp_path, models=MODELS) as started:
        yield started


async def get(gateway: Gateway, path: str, secret: str = "") -> Any:
    answer = await gateway.client.get(path, headers={"x-api-key": secret} if secret else {})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    check_answer("get", path.partition("?")[0], answer.status_code, body)
    return body


async def test_cards_have_what_is_known_of_a_model_and_nothing_else(gateway: Gateway) -> None:
    card, brief, gone = (await get(gateway, "/v1/models"))["data"]

    assert card["meta"]["n_ctx"] == card["context_length"] == 2048
    assert card["meta"]["n_ctx_train"] == 32768
    assert (card["meta"]["n_params"], card["meta"]["size"]) == (10_656_064, 21_325_056)
    assert brief["meta"] == card["meta"]
    assert gone["meta"] == {}
    assert (await gateway.client.get("/models")).json() == await get(gateway, "/v1/models")


async def test_props_have_the_context_of_a_model_that_is_not_loaded_yet(tmp_path: Path) -> None:
    async with running(tmp_path, models=[ModelConfig(name="m", path="demo")]) as gateway:
        assert (await get(gateway, "/props?model=m"))["default_generation_settings"] == {"n_ctx": 32768}


async def test_cards_tell_the_sampling_of_a_silent_request(tmp_path: Path) -> None:
    brief = ProfileConfig(sampling=SamplingDefaults(temperature=0.2, max_tokens=50))
    model = ModelConfig(name="m", path="demo", sampling=SamplingDefaults(top_k=20), profiles={"brief": brief})
    async with running(tmp_path, models=[model]) as gateway:
        whole, short = (card["default_sampling"] for card in (await get(gateway, "/v1/models"))["data"])

    assert (whole["temperature"], whole["top_k"], "max_tokens" in whole) == (1.0, 20, False)
    assert (short["temperature"], short["top_k"], short["max_tokens"]) == (0.2, 20, 50)


async def test_a_card_tells_how_far_a_load_has_come_without_a_session(tmp_path: Path) -> None:
    async with running(tmp_path, ["--load-s", "30"], [ModelConfig(name="m", path="m")]) as gateway:
        (before,) = (await get(gateway, "/v1/models"))["data"]
        asking = asyncio.create_task(gateway.client.post("/v1/chat/completions", json=chat()))
        async with asyncio.timeout(patient(60)):
            while (card := (await get(gateway, "/v1/models"))["data"][0])["state"] != "loading":
                pass
        asking.cancel()

    assert "load" not in before
    assert card["load"].keys() == {"stage", "loaded_bytes", "total_bytes"}


async def test_props_are_of_the_model_that_is_asked_for_by_any_of_its_names(gateway: Gateway) -> None:
    for name in ("m", "gpt-4o"):
        props = await get(gateway, f"/props?model={name}")
        assert props["default_generation_settings"] == {"n_ctx": 2048}
        assert (props["model_alias"], props["total_slots"]) == ("m", 16)
        assert props["modalities"] == {"vision": False, "audio": False}
        assert "tools" in props["chat_template"]
    assert (await get(gateway, "/props?model=gpt-4o:brief"))["model_alias"] == "m:brief"
    gone = await get(gateway, "/props?model=gone")
    assert (gone["default_generation_settings"], gone["total_slots"]) == ({}, 3)
    assert "chat_template" not in gone

    assert (await gateway.client.get("/props?model=nope")).status_code == 404
    assert (await gateway.client.get("/props")).json()["error"]["param"] == "model"
    assert (await gateway.client.get("/v1/props")).status_code == 404


async def test_a_key_sees_its_models_only_and_props_need_no_name_where_there_is_one(tmp_path: Path) -> None:
    key = Key(name="k", prefix="", salt="", hash="", models=("gone",))
    secret = KeyFile(tmp_path / "keys" / "keys.json").create(key)[1]
    async with running(tmp_path, models=MODELS, server=ServerConfig(default="m")) as gateway:
        assert [card["id"] for card in (await get(gateway, "/v1/models", secret))["data"]] == ["gone"]
        assert (await gateway.client.get("/v1/models")).status_code == 401
        assert (await get(gateway, "/props", secret))["model_alias"] == "gone"
        refused = await gateway.client.get("/props?model=gpt-4o", headers={"x-api-key": secret})
        assert refused.status_code == 404
        assert (await gateway.client.get("/props")).status_code == 401
