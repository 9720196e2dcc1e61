"""One key among others: what it sends at once leaves room for them."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.config.settings import ModelConfig, ServerConfig
from tests.gateway.harness import Gateway, chat, running, until
from tests.gateway.middleware.test_auth import bearer, make

pytestmark = pytest.mark.anyio
MODEL = ModelConfig(name="m", path="m", max_running=4)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def with_forty_places(*arguments: Any) -> AsyncGenerator[Gateway, None]:
    """A gateway that runs 4 requests of the model, beside which 36 may wait."""
    async with running(*arguments) as gateway:
        gateway.app.services.admission.waiting_max = 36
        yield gateway


async def complete(gateway: Gateway, secret: str, prompts: int, n: int = 1) -> tuple[int, str]:
    body = {"model": "m", "prompt": ["x"] * prompts, "n": n, "max_tokens": 200}
    answer = await gateway.client.post("/v1/completions", json=body, headers=bearer(secret))
    return answer.status_code, answer.text


async def test_one_keys_sequences_never_fill_the_queue_for_another(tmp_path: Path) -> None:
    greedy, modest = make(tmp_path, "greedy"), make(tmp_path, "modest")
    async with with_forty_places(tmp_path, ["--step-ms", "5"], [MODEL]) as gateway:
        status, text = await complete(gateway, greedy, 40)
        assert (status, "at most 20" in text) == (400, True)
        flood = asyncio.create_task(complete(gateway, greedy, 20))
        await until(lambda: gateway.app.services.admission.inside("m") == 20)
        status, text = await complete(gateway, greedy, 1)
        assert (status, "20 of the 20 places" in text) == (429, True)

        answer = await gateway.client.post("/v1/chat/completions", json=chat(), headers=bearer(modest))
        assert answer.status_code == 200
        flood.cancel()
        assert gateway.metrics.model("m").rejections["key_share"] == 1


async def test_the_only_key_has_the_whole_queue_and_a_key_may_have_a_share_of_its_own(tmp_path: Path) -> None:
    only = make(tmp_path, "only", queue_share=10)
    async with with_forty_places(tmp_path, [], [MODEL], ServerConfig()) as gateway:
        assert (await complete(gateway, only, 40))[0] == 200
        other = make(tmp_path, "other")
        assert "at most 4" in (await complete(gateway, only, 40))[1]
        assert "at most 20" in (await complete(gateway, other, 40))[1]


async def test_a_key_that_only_reads_metrics_takes_no_share_of_a_queue(tmp_path: Path) -> None:
    only = make(tmp_path, "only")
    make(tmp_path, "prometheus", is_metrics_only=True)
    async with with_forty_places(tmp_path, [], [MODEL], ServerConfig()) as gateway:
        assert (await complete(gateway, only, 30))[0] == 200


@pytest.mark.anyio
async def test_a_key_of_one_at_once_cannot_have_a_thousand(tmp_path: Path) -> None:
    secret = make(tmp_path, "k", rpm=1000, concurrency=1)
    async with with_forty_places(tmp_path, [], [MODEL]) as gateway:
        status, text = await complete(gateway, secret, 13, 3)
        assert (status, "39 sequences in one request; key 'k' may have 1 at once" in text) == (400, True)
        assert (await complete(gateway, secret, 1))[0] == 200


async def test_too_many_sequences_are_refused_before_any_is_made(tmp_path: Path) -> None:
    async with with_forty_places(tmp_path, [], [MODEL]) as gateway:
        before = gateway.link.next_rid()
        body = {"model": "m", "prompt": ["x"] * 4096, "n": 16, "max_tokens": 1}
        answer = await gateway.client.post("/v1/completions", json=body)
        assert (answer.status_code, "65536 sequences" in answer.text) == (400, True)
        assert gateway.link.next_rid() == before + 1


async def test_a_conversation_that_is_continued_reserves_its_length_and_not_that_of_the_request(tmp_path: Path) -> None:
    secret = make(tmp_path, "k", tpm=10_000)
    long = {"model": "m", "input": "word " * 4000, "max_output_tokens": 1}
    async with running(tmp_path) as gateway:
        first = await gateway.client.post("/v1/responses", json=long, headers=bearer(secret))
        assert first.status_code == 200
        body = {"model": "m", "previous_response_id": first.json()["id"], "input": "never", "max_output_tokens": 1000}
        with gateway.app.services.keyring.meters["k"].hold(6000):
            second = await gateway.client.post("/v1/responses", json=body, headers=bearer(secret))
        assert (second.status_code, second.json()["error"]["type"]) == (429, "tokens")
