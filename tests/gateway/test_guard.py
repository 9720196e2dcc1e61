import asyncio
import json
from collections.abc import AsyncGenerator

import pytest

from gateway.guard import HEAD_BYTES_MAX, GuardedProtocol
from tests.gateway.harness import DEADLINE_S, Gateway, chat, running, until

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Gateway, None]:
    async with running(tmp_path_factory.mktemp("h"), ["--step-ms", "1"]) as running_gateway:
        yield running_gateway


class Hasty(GuardedProtocol):
    head_timeout_s = 0.1
    linger_s = 0.1


@pytest.fixture(scope="module")
async def hasty(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Gateway, None]:
    async with running(tmp_path_factory.mktemp("h"), ["--step-ms", "1"], protocol=Hasty) as running_gateway:
        yield running_gateway


async def exchange(gateway: Gateway, *pieces: bytes) -> bytes:
    """Everything that is answered until the server closes or the client has its first answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    try:
        async with asyncio.timeout(DEADLINE_S):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            return await reader.readuntil(b"\r\n")
    finally:
        writer.close()


async def test_headers_of_an_ordinary_client_pass(gateway: Gateway) -> None:
    padding = b"x-a: " + b"a" * 30_000 + b"\r\n"
    assert b" 200 " in await exchange(gateway, b"GET /livez HTTP/1.1\r\nhost: x\r\n", padding, b"\r\n")


@pytest.mark.parametrize("pieces", [1, 7, 40])
async def test_headers_that_are_too_large_are_a_431(gateway: Gateway, pieces: int) -> None:
    length = HEAD_BYTES_MAX // pieces + 100
    one = (
        [b"x-a: " + b"a" * (length * pieces) + b"\r\n\r\n"]
        if pieces == 1
        else [b"x-a: " + b"a" * length + b"\r\n"] * pieces
    )

    assert b" 431 " in await exchange(gateway, b"GET /livez HTTP/1.1\r\nhost: x\r\n", *one)


async def test_a_header_without_an_end_does_not_grow_in_memory(gateway: Gateway) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(b"GET /livez HTTP/1.1\r\nx-a: ")
    sent = 0
    async with asyncio.timeout(DEADLINE_S):
        try:
            while not reader.at_eof() and sent < 100 * HEAD_BYTES_MAX:
                writer.write(b"a" * 8192)
                await writer.drain()
                await asyncio.sleep(0)
                sent += 8192
        except ConnectionError:
            pass
    writer.close()

    assert sent < 100 * HEAD_BYTES_MAX


async def test_a_long_path_is_refused_too(gateway: Gateway) -> None:
    assert b" 431 " in await exchange(gateway, b"GET /" + b"a" * HEAD_BYTES_MAX + b" HTTP/1.1\r\nhost: x\r\n\r\n")


async def test_the_limit_is_for_each_request_of_a_connection(gateway: Gateway) -> None:
    answers = [await gateway.client.get("/livez", headers={"x-a": "a" * (HEAD_BYTES_MAX // 3)}) for _ in range(8)]
    assert {answer.status_code for answer in answers} == {200}


async def test_a_large_body_is_no_large_head(gateway: Gateway) -> None:
    body = {"model": "m", "prompt": "a" * (10 * HEAD_BYTES_MAX), "max_tokens": 1}
    for _ in range(2):
        assert (await gateway.client.post("/v1/completions", json=body)).status_code == 200


async def test_requests_in_one_packet_are_all_answered(gateway: Gateway) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    request = b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"
    last = b"GET /livez HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    writer.write(request * 20 + last)
    async with asyncio.timeout(DEADLINE_S):
        answers = await reader.read(-1)
    writer.close()

    assert answers.count(b"HTTP/1.1 200 OK") == 21


@pytest.mark.parametrize("said", [b"", b"GET /livez HT", b"\r\n\r\n", b"GET /livez HTTP/1.1\r\nx-a: 1\r\n"])
async def test_a_head_that_does_not_come_is_given_up(hasty: Gateway, said: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", hasty.port)
    writer.write(said)
    async with asyncio.timeout(DEADLINE_S):
        assert await reader.read(-1) == b""
    writer.close()


async def test_a_body_that_nobody_waits_for_cannot_hold_a_connection(hasty: Gateway) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", hasty.port)
    writer.write(b"POST /nope HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\nabc")
    async with asyncio.timeout(DEADLINE_S):
        assert b"404" in await reader.readline()
        # Trickles on, and is cut off all the same.
        while not reader.at_eof():
            writer.write(b"a")
            await reader.read(1000)
    writer.close()


async def test_an_answer_is_never_cut_off_by_the_time_for_a_head(hasty: Gateway) -> None:
    body = b'{"model": "m", "prompt": "hi", "max_tokens": 300, "stream": true}'
    reader, writer = await asyncio.open_connection("127.0.0.1", hasty.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body + b"\r\n")
    async with asyncio.timeout(DEADLINE_S):
        answer = await reader.readuntil(b"[DONE]")
    writer.close()

    assert b"t299" in answer


@pytest.mark.parametrize("before", [b"", b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"], ids=["first", "second"])
async def test_a_client_that_leaves_with_another_request_behind_its_stream_has_left(
    gateway: Gateway, before: bytes
) -> None:
    """The connection knows of its newest request, and the one that is answered is not that one."""
    body = json.dumps(chat(stream=True, max_tokens=100_000)).encode()
    request = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(before + request)
    async with asyncio.timeout(DEADLINE_S):
        await reader.readuntil(b'"content":')
        writer.write(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
        await writer.drain()
        await reader.readuntil(b'"content":')
        assert gateway.link.in_flight == 1
        writer.transport.abort()
        await until(lambda: gateway.link.in_flight == 0)
    assert gateway.metrics.unhandled_errors == 0
