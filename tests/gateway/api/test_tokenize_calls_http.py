"""Tokenize calls: metered and bounded by key, like requests that generate."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway.request.admission import TOKENIZE_CALLS_PER_KEY_MAX
from tests.gateway.harness import Gateway, running, until
from tests.gateway.middleware.test_auth import bearer, make

pytestmark = pytest.mark.anyio
MESSAGES = [{"role": "user", "content": "hi"}]
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/tokenize", {"model": "m", "prompt": "hi"}),
    ("/detokenize", {"model": "m", "tokens": [1]}),
    ("/v1/messages/count_tokens", {"model": "m", "messages": MESSAGES}),
    ("/v1/responses/input_tokens", {"model": "m", "input": "hi"}),
]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


async def ask(gateway: Gateway, secret: str, path: str, body: dict[str, Any]) -> int:
    return (await gateway.client.post(path, json=body, headers=bearer(secret))).status_code


async def test_every_tokenize_call_is_a_request_of_the_minute(tmp_path: Path) -> None:
    async with running(tmp_path) as gateway:
        for path, body in ROUTES:
            secret = make(tmp_path, f"k{path.replace('/', '.')}", rpm=1)
            assert [await ask(gateway, secret, path, body) for _ in range(2)] == [200, 429], path
            assert await ask(gateway, secret, "/v1/responses/resp_1/cancel", {}) == 404


async def test_a_keys_tokenize_calls_are_bounded_and_end_with_their_clients(tmp_path: Path) -> None:
    secret, other = make(tmp_path, "k"), make(tmp_path, "other")
    never = {"model": "m", "prompt": "never"}
    async with running(tmp_path) as gateway:
        assert await ask(gateway, secret, *ROUTES[0]) == 200
        admission = gateway.app.services.admission
        asking = [
            asyncio.create_task(ask(gateway, secret, "/tokenize", never)) for _ in range(TOKENIZE_CALLS_PER_KEY_MAX)
        ]
        await until(lambda: admission.inside("m") == TOKENIZE_CALLS_PER_KEY_MAX)
        assert await ask(gateway, secret, *ROUTES[0]) == 429
        assert await ask(gateway, other, *ROUTES[0]) == 200
        assert gateway.metrics.model("m").rejections["questions"] == 1
        for task in asking:
            task.cancel()
        await until(lambda: admission.inside("m") == 0)
        assert await ask(gateway, secret, *ROUTES[0]) == 200


async def test_no_tokenize_call_begins_while_the_daemon_drains(tmp_path: Path) -> None:
    async with running(tmp_path) as gateway:
        gateway.app.drain()
        answer = await gateway.client.post("/tokenize", json={"model": "m", "prompt": "hi"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")


async def test_variables_that_the_renderer_sets_are_refused_as_those_of_a_chat_are(tmp_path: Path) -> None:
    async with running(tmp_path) as gateway:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"self": 1}}
        answer = await gateway.client.post("/tokenize", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "chat_template_kwargs")
