"""No client gives up on a request that is being worked on: each API's stream begins at once and shows signs of life."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import httpx2
import pytest

from gateway.http.sse import DEFAULT_PACE
from tests.gateway.harness import DEADLINE_S, Gateway, running
from tests.support.scale import patient

pytestmark = pytest.mark.anyio

# The idle timers that clients have by default; Codex's is the longest, and the SDKs' are of minutes too.
SHORTEST_IDLE_TIMER_S: Final = 60.0
FIRST_BYTE_S: Final = 2.0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


APIS: Final[dict[str, Callable[[str], dict[str, Any]]]] = {
    "/v1/chat/completions": lambda text: {"messages": user(text)},
    "/v1/completions": lambda text: {"prompt": text},
    "/v1/responses": lambda text: {"input": text},
    "/v1/messages": lambda text: {"messages": user(text), "max_tokens": 5},
}
each_api = pytest.mark.parametrize("path", APIS)


@asynccontextmanager
async def streaming(gateway: Gateway, path: str, text: str) -> AsyncGenerator[httpx2.Response]:
    body = {"model": "m", "stream": True, **APIS[path](text)}
    async with gateway.client.stream("POST", path, json=body, timeout=patient(DEADLINE_S)) as answer:
        assert answer.status_code == 200
        yield answer


def test_the_pace_is_quicker_than_any_clients_timer() -> None:
    assert DEFAULT_PACE.hold_s <= FIRST_BYTE_S / 2
    assert DEFAULT_PACE.keepalive_s <= SHORTEST_IDLE_TIMER_S / 4


@each_api
async def test_a_stream_has_its_first_byte_while_a_cold_model_loads(tmp_path: Path, path: str) -> None:
    async with running(tmp_path, ["--hang-on-load"]) as gateway, streaming(gateway, path, "hi") as answer:
        async with asyncio.timeout(FIRST_BYTE_S * 2):  # others use this machine, too
            first = await anext(answer.aiter_bytes())
        assert first.strip()


@each_api
async def test_a_stream_has_its_first_byte_while_a_prompt_waits_or_is_processed(tmp_path: Path, path: str) -> None:
    async with running(tmp_path) as gateway:
        await gateway.pool.load("m")
        # This worker accepts it and then says nothing of it.
        async with streaming(gateway, path, "stuck") as answer, asyncio.timeout(FIRST_BYTE_S * 2):
            first = await anext(answer.aiter_bytes())
        assert first.strip()
