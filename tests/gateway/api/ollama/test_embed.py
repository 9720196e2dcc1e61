"""Embeddings in Ollama's forms: the vectors of `/v1/embeddings`."""

from collections.abc import AsyncGenerator
from typing import Any

import pytest

from gateway.config.settings import ModelConfig
from tests.gateway.harness import Gateway, serving
from tests.support.published import check_answer
from tests.support.reading_models import build_embedder

pytestmark = pytest.mark.anyio

TEXTS = ["mia kato dormas", "la hundo kuras kaj kuras"]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Gateway, None]:
    folder = build_embedder("bert", tmp_path_factory.mktemp("bert"))
    async with serving(ModelConfig(name="e", path=str(folder)), ModelConfig(name="demo", path="demo")) as started:
        yield started


async def ask(gateway: Gateway, path: str, status: int = 200, **fields: Any) -> Any:
    answer = await gateway.client.post(path, json={"model": "e"} | fields)
    assert answer.status_code == status, answer.text
    check_answer("POST", path, status, answer.json())
    return answer.json()


async def test_vectors_are_those_of_openais_route_in_both_forms(gateway: Gateway) -> None:
    body = {"model": "e", "input": TEXTS, "encoding_format": "float"}
    expected = [each["embedding"] for each in (await gateway.client.post("/v1/embeddings", json=body)).json()["data"]]
    both = await ask(gateway, "/api/embed", input=TEXTS, keep_alive="5m", options={"num_ctx": 512})
    one = await ask(gateway, "/api/embed", input=TEXTS[0], model="e:latest")
    old = await ask(gateway, "/api/embeddings", prompt=TEXTS[0])

    for told, wanted in zip(
        [*both["embeddings"], *one["embeddings"], old["embedding"]], [*expected, expected[0], expected[0]], strict=True
    ):
        assert told == pytest.approx(wanted, abs=1e-6)
    assert both["prompt_eval_count"] > one["prompt_eval_count"] > 0
    assert both["total_duration"] > 0


async def test_a_long_input_is_cut_unless_that_is_forbidden(gateway: Gateway) -> None:
    long = "kato " * 400
    assert len((await ask(gateway, "/api/embed", input=long))["embeddings"]) == 1
    assert "error" in await ask(gateway, "/api/embed", 400, input=long, truncate=False)


async def test_nothing_to_embed_loads_the_model(gateway: Gateway) -> None:
    assert (await ask(gateway, "/api/embed"))["embeddings"] == []
    assert await ask(gateway, "/api/embeddings", prompt="") == {"embedding": []}
    assert "e" in [model["name"] for model in (await gateway.client.get("/api/ps")).json()["models"]]


async def test_what_cannot_be_embedded_is_one_text(gateway: Gateway) -> None:
    assert "input" in (await ask(gateway, "/api/embed", 400, input=["a", ""]))["error"]
    assert "demo" in (await ask(gateway, "/api/embed", 400, input="a", model="demo"))["error"]
    assert "nope" in (await ask(gateway, "/api/embed", 404, input="a", model="nope"))["error"]
