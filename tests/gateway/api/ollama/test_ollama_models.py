"""Models in Ollama's forms, over HTTP."""

from collections.abc import AsyncGenerator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.access.key import Key, KeyFile
from gateway.api.compat.ollama_models import parameter_size
from gateway.config.settings import ModelConfig, ProfileConfig, SamplingDefaults
from tests.gateway.harness import Gateway, running
from tests.support.published import check_answer

pytestmark = pytest.mark.anyio

# Their files are those of the demo models; their workers are scripted.
MODELS = (
    ModelConfig(
        name="m",
        path="demo",
        aliases=("gpt-4o",),
        context=2048,
        ttl_s=600.0,
        sampling=SamplingDefaults(temperature=0.5, repetition_penalty=1.1),
        profiles={"brief": ProfileConfig(SamplingDefaults(max_tokens=9))},
    ),
    ModelConfig(name="gone", path="nobody/not-here"),
)


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncGenerator[Gateway, None]:
    async with running(tmp_path, ["--step-ms", "1"], models=MODELS) as started:
        yield started


async def get(gateway: Gateway, path: str) -> Any:
    answer = await gateway.client.get(path)
    check_answer("GET", path, answer.status_code, answer.json())
    return answer.json()


async def show(gateway: Gateway, **fields: Any) -> Any:
    answer = await gateway.client.post("/api/show", json=fields)
    check_answer("POST", "/api/show", answer.status_code, answer.json())
    return answer.json()


async def test_tags_have_each_model_and_profile_with_what_its_files_say(gateway: Gateway) -> None:
    model, brief, gone = (await get(gateway, "/api/tags"))["models"]

    assert (model["name"], model["model"], brief["name"], gone["name"]) == ("m", "m", "m:brief", "gone")
    assert model["size"] == 21_325_056
    assert model["details"]["format"] == "mlx"
    assert (model["details"]["parameter_size"], brief["details"]["parent_model"]) == ("10.66M", "m")
    assert len(model["digest"]) == 64
    assert model["digest"] == brief["digest"] != gone["digest"]
    assert datetime.fromisoformat(model["modified_at"]).year > 2020
    assert gone["size"] == 0


async def test_a_shown_model_says_its_context_and_abilities_where_clients_look_for_them(gateway: Gateway) -> None:
    shown = await show(gateway, model="m")

    architecture = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{architecture}.context_length"] == 2048
    assert shown["model_info"]["general.parameter_count"] == 10_656_064
    assert {"completion", "tools"} <= set(shown["capabilities"])
    assert shown["parameters"].splitlines() == ["temperature 0.5", "repeat_penalty 1.1"]
    assert "messages" in shown["template"]
    for name in ("gpt-4o", "m:latest"):
        assert await show(gateway, name=name) == shown
    assert "num_predict 9" in (await show(gateway, model="m:brief"))["parameters"]


async def test_only_an_admin_sees_the_path_of_a_model(gateway: Gateway, tmp_path: Path) -> None:
    before = gateway.app.services.config
    local = replace(before.models["m"], path=str(tmp_path / "weights"))
    gateway.app.services.live.apply(replace(before, models=before.models | {"m": local}))
    keys = KeyFile(tmp_path / "keys" / "keys.json")
    for is_admin, source in (False, "m"), (True, local.path):
        key = Key(name=f"k{is_admin}", prefix="", salt="", hash="", is_admin=is_admin)
        gateway.client.headers["x-api-key"] = keys.create(key)[1]
        assert (await show(gateway, model="m"))["modelfile"].splitlines()[-1] == f"FROM {source}"
        assert (await gateway.client.get("/props?model=m")).json()["model_path"] == source
        assert (await gateway.client.get("/v1/models/m")).json()["root"] == source


async def test_the_repository_of_a_model_is_no_secret(gateway: Gateway) -> None:
    assert (await gateway.client.get("/v1/models/m")).json()["root"] == "demo"


async def test_an_unknown_model_is_a_404_with_a_text(gateway: Gateway) -> None:
    answer = await gateway.client.post("/api/show", json={"model": "nope"})

    assert answer.status_code == 404
    assert "nope" in answer.json()["error"]


async def test_a_loaded_model_tells_its_context_and_when_it_expires(gateway: Gateway) -> None:
    assert await get(gateway, "/api/ps") == {"models": []}
    await gateway.client.post("/api/generate", json={"model": "m"})
    (running_model,) = (await get(gateway, "/api/ps"))["models"]

    assert (running_model["name"], running_model["context_length"]) == ("m", 1 << 20)
    assert running_model["size"] == running_model["size_vram"]
    left = datetime.fromisoformat(running_model["expires_at"]).timestamp() - datetime.now().timestamp()
    assert 0 < left <= 601


async def test_the_version_is_a_recent_one(gateway: Gateway) -> None:
    version = (await get(gateway, "/api/version"))["version"]

    # Copilot wants 0.6.4.
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)


@pytest.mark.parametrize(
    ("parameters", "text"),
    [(None, ""), (596_049_920, "596.05M"), (8_190_735_360, "8.2B"), (1500, "1.50K"), (235_000_000_000, "235.0B")],
)
def test_parameters_are_written_as_ollama_does(parameters: int | None, text: str) -> None:
    assert parameter_size(parameters) == text
