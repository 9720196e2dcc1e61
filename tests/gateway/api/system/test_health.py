from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from gateway.config.settings import Config, ModelConfig, ServerConfig
from gateway.workers.supervisor.state import State
from tests.gateway.harness import Gateway, chat, running, until
from tests.gateway.middleware.test_auth import make

pytestmark = pytest.mark.anyio

MODELS = [
    ModelConfig(name="org/one", path="p1", aliases=("default", "claude-*"), context=4096),
    ModelConfig(name="two", path="p2"),
]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Gateway, None]:
    async with running(tmp_path_factory.mktemp("g"), models=MODELS) as running_gateway:
        yield running_gateway


async def test_the_list_of_models_has_openais_fields_and_more(gateway: Gateway) -> None:
    body = (await gateway.client.get("/v1/models?limit=1000")).json()

    assert body["object"] == "list"
    one, two = body["data"]
    assert (one["id"], one["object"], one["owned_by"]) == ("org/one", "model", "mlxd")
    assert isinstance(one["created"], int)
    assert one["aliases"] == ["default", "claude-*"]
    assert one["context_length"] == one["max_model_len"] == 4096
    assert two["id"] == "two"
    assert "context_length" not in two


@pytest.mark.parametrize("name", ["org/one", "default", "claude-opus-4", "org%2Fone"])
async def test_one_model_is_found_by_its_name_with_a_slash_and_by_alias(gateway: Gateway, name: str) -> None:
    assert (await gateway.client.get(f"/v1/models/{name}")).json()["id"] == "org/one"


async def test_an_unknown_model_is_not_found(gateway: Gateway) -> None:
    answer = await gateway.client.get("/v1/models/org/other")

    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"


async def test_an_alias_is_served_by_its_model(gateway: Gateway) -> None:
    answer = await gateway.client.post("/v1/chat/completions", json=chat(model="claude-haiku"))

    assert answer.json()["model"] == "org/one"


async def test_a_gateway_that_loads_on_demand_is_healthy_and_ready_while_nothing_runs(gateway: Gateway) -> None:
    health = await gateway.client.get("/health")

    assert (health.status_code, health.json()["status"]) == (200, "healthy")
    assert (await gateway.client.get("/healthz")).json()["status"] == "healthy"
    assert (await gateway.client.get("/readyz")).status_code == 200
    assert (await gateway.client.get("/livez")).status_code == 200


async def test_the_root_is_friendly_and_head_is_allowed(gateway: Gateway) -> None:
    root = await gateway.client.get("/")
    head = await gateway.client.head("/")

    assert root.json()["models"] == ["org/one", "two"]
    assert (head.status_code, head.content) == (200, b"")
    assert (await gateway.client.head("/health")).status_code == 200


async def test_not_ready_until_the_preloaded_models_are(tmp_path: Path) -> None:
    models = [ModelConfig(name="m", path="m", preload=True)]
    async with running(tmp_path, ["--load-s", "0.3"], models=models) as gateway:
        waiting = await gateway.client.get("/readyz")
        await until(lambda: gateway.pool.worker("m").state is State.READY)
        ready = await gateway.client.get("/readyz")

    assert waiting.status_code == 503
    assert waiting.json()["reasons"][0].startswith("model m is ")
    assert ready.status_code == 200


async def test_one_broken_model_is_degraded_and_all_broken_are_unhealthy(tmp_path: Path) -> None:
    models = [ModelConfig(name="m", path="m"), ModelConfig(name="n", path="n")]
    async with running(tmp_path, ["--exit-on-load", "66", "--goodbye-code", "21"], models=models) as gateway:
        await gateway.client.post("/v1/chat/completions", json=chat())
        degraded = await gateway.client.get("/health")
        await gateway.client.post("/v1/chat/completions", json=chat(model="n"))
        unhealthy = await gateway.client.get("/health")

    assert (degraded.status_code, degraded.json()["status"]) == (200, "degraded")
    assert degraded.json()["reasons"] == ["model m is failed: cannot be loaded"]
    assert (unhealthy.status_code, unhealthy.json()["status"]) == (503, "unhealthy")


async def test_a_store_of_responses_that_was_damaged_is_degraded_and_fails_nothing(tmp_path: Path) -> None:
    store = Config(tmp_path, ServerConfig(), {}, tmp_path / "mlxd.toml").store_path
    store.parent.mkdir(parents=True)
    store.write_bytes(b"no database" * 1000)
    async with running(tmp_path) as gateway:
        await until(lambda: gateway.metrics.store_problems["damaged"] == 1)
        health = await gateway.client.get("/health")
        make(tmp_path, "k")
        stranger = await gateway.client.get("/health")

    assert (health.status_code, health.json()["status"]) == (200, "degraded")
    assert "store of responses" in health.json()["reasons"][0]
    assert (stranger.status_code, stranger.json()) == (200, {"status": "degraded", "reasons": []})
