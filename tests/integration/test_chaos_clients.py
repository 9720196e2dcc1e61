"""Clients that leave, half-leave or hold on, in every phase of a request: what they had is free at once."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.gateway.harness import Gateway, chat, running, until

pytestmark = pytest.mark.anyio

QUEUED = {"model": "m", "prompt": "ignored"}
PREFILLING = chat(json.dumps([["progress"]]))
DECODING = chat(max_tokens=1_000_000)


@asynccontextmanager
async def connected(gateway: Gateway) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter], None]:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    try:
        yield reader, writer
    finally:
        writer.close()


def http(path: str, body: dict[str, object]) -> bytes:
    data = json.dumps(body).encode()
    return b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%s" % (path.encode(), len(data), data)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "state"),
    [
        ("/v1/completions", QUEUED, "queued"),
        ("/v1/chat/completions", PREFILLING, "prefill"),
        ("/v1/chat/completions", DECODING, "decode"),
    ],
    ids=["queued", "prefilling", "decoding"],
)
async def test_a_client_that_leaves_frees_its_place_in_every_phase(
    tmp_path: Path, path: str, body: dict[str, object], state: str, stream: bool
) -> None:
    async with running(tmp_path, ["--step-ms", "5"], worker="talkative") as gateway:
        # Queued is also a request whose model has not begun to load: this one is at its worker.
        await leave(gateway, http(path, body | {"stream": stream}), lambda: gateway.link.in_flight == 1, state)

        assert gateway.metrics.model("m").finished == {"abort": 1}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_while_its_model_loads_frees_its_place(tmp_path: Path, stream: bool) -> None:
    async with running(tmp_path, ["--hang-on-load"]) as gateway:
        await leave(gateway, http("/v1/completions", QUEUED | {"stream": stream}), lambda: True, "loading")

        assert gateway.metrics.model("m").finished == {}, "no sequence has begun"
        assert gateway.metrics.model("m").opening == 0


async def leave(gateway: Gateway, request: bytes, condition: Callable[[], bool], state: str) -> None:
    """Ask, close the connection in this state, and find everything given back."""
    requests = gateway.app.services.requests
    async with connected(gateway) as (_, writer):
        writer.write(request)
        await until(lambda: [view.state for view in requests.views()] == [state] and condition())
    await until(lambda: not requests.views())
    assert gateway.link.in_flight == 0
    assert gateway.app.services.admission.inside("m") == 0
    assert gateway.pool.broker.leases("m") == 0


async def test_a_client_that_leaves_after_its_answer_aborts_nothing(tmp_path: Path) -> None:
    async with running(tmp_path, ["--step-ms", "1"]) as gateway:
        for stream in (False, True):
            async with connected(gateway) as (reader, writer):
                writer.write(http("/v1/chat/completions", chat(stream=stream)))
                await reader.readuntil(b"data: [DONE]\n\n" if stream else b'"finish_reason":"length"')

        await until(lambda: gateway.metrics.model("m").finished["length"] == 2)
        assert gateway.metrics.model("m").finished["abort"] == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_closes_its_half_still_gets_its_whole_answer(tmp_path: Path, stream: bool) -> None:
    async with running(tmp_path, ["--step-ms", "20"]) as gateway, connected(gateway) as (reader, writer):
        writer.write(http("/v1/chat/completions", chat(stream=stream, max_tokens=20)))
        writer.write_eof()
        answer = await reader.read()

        assert b"t0 " in answer
        assert answer.count(b'"finish_reason":"length"') == 1
        assert b"data: [DONE]" in answer if stream else answer.endswith(b"}")
        assert gateway.metrics.model("m").finished == {"length": 1}


async def test_a_half_that_is_closed_amid_a_stream_is_no_end_of_it(tmp_path: Path) -> None:
    async with running(tmp_path, ["--step-ms", "10"]) as gateway, connected(gateway) as (reader, writer):
        writer.write(http("/v1/chat/completions", chat(stream=True, max_tokens=50)))
        await reader.readuntil(b"t3 ")
        writer.write_eof()
        rest = await reader.read()

        assert b"t49 " in rest
        assert b"data: [DONE]" in rest
        assert gateway.metrics.model("m").finished == {"length": 1}


async def test_requests_sent_ahead_on_one_connection_are_answered_in_order(tmp_path: Path) -> None:
    async with running(tmp_path, ["--step-ms", "1"]) as gateway, connected(gateway) as (reader, writer):
        for count in (3, 2, 1):
            writer.write(http("/v1/chat/completions", chat(max_tokens=count)))
        writer.write_eof()
        answer = await reader.read()

        assert [answer.count(b"t%d " % number) for number in range(3)] == [3, 2, 1]
        assert answer.find(b"t2 ") < answer.rfind(b"t1 ") < answer.rfind(b"t0 ")
        assert gateway.metrics.model("m").finished == {"length": 3}
