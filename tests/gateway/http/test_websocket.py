"""WebSocket handshakes and frames, byte by byte over real sockets."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from tests.gateway.harness import Gateway, running, until
from tests.support.scale import patient

pytestmark = pytest.mark.anyio

OFFER = b"host: localhost\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
KEY = b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
HANDSHAKE = b"GET /v1/responses?x=1 HTTP/1.1\r\n" + OFFER + KEY + b"sec-websocket-version: 13\r\n\r\n"
# The answer to the sample key of RFC 6455.
ACCEPTED = b"sec-websocket-accept: s3pplmbitxaq9kygzzhzrbk+xoo="
# Frames of a client with the mask 0: a ping, and a close with the code 1000.
PING = b"\x89\x82\x00\x00\x00\x00hi"
CLOSE = b"\x88\x82\x00\x00\x00\x00\x03\xe8"


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Gateway, None]:
    async with running(tmp_path_factory.mktemp("g"), worker="talkative") as running_gateway:
        yield running_gateway


async def said(gateway: Gateway, request: bytes) -> bytes:
    """All that is answered to a request, until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    answer = b""
    async with asyncio.timeout(patient(20)):
        writer.write(request)
        with contextlib.suppress(ConnectionResetError):
            answer = await reader.read()
    writer.close()
    return answer


async def exchanged(gateway: Gateway, *pieces: bytes) -> bytes:
    """The answer to a handshake in pieces, and to a ping and a close after it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    async with asyncio.timeout(patient(20)):
        for piece in pieces:
            writer.write(piece)
            # The loop sends it before the next piece.
            await asyncio.sleep(0)
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(PING + CLOSE)
        rest = await reader.read()
    writer.close()
    return head + rest


async def test_a_handshake_is_accepted_however_it_is_split(gateway: Gateway) -> None:
    for at in range(1, len(HANDSHAKE), 13):
        answer = await exchanged(gateway, HANDSHAKE[:at], HANDSHAKE[at:])

        assert answer.startswith(b"HTTP/1.1 101 "), (at, answer)
        assert ACCEPTED in answer.lower()
        assert b"x-request-id: " in answer.lower()
        # The pong, and the close with the same code.
        assert answer.endswith(b"\x8a\x02hi\x88\x02\x03\xe8"), answer
    await until(lambda: gateway.metrics.websockets() == 0)


@pytest.mark.parametrize(
    "request_bytes",
    [
        HANDSHAKE.replace(b"13\r\n", b"8\r\n"),
        HANDSHAKE.replace(KEY, b""),
        HANDSHAKE.replace(KEY, KEY + KEY),
        HANDSHAKE.replace(b"dGhl", b"!!!!"),
        HANDSHAKE.replace(b"GET", b"POST"),
        HANDSHAKE.replace(b"/v1/responses", b"/v1/models"),
        HANDSHAKE.replace(b"/v1/responses", b"/v1/responses/"),
        HANDSHAKE.replace(KEY, KEY + b"content-length: 4\r\n") + b"body",
        HANDSHAKE.replace(KEY, KEY + b"transfer-encoding: chunked\r\n") + b"0\r\n\r\n",
        HANDSHAKE.replace(KEY, KEY + b"x: " + b"y" * 9000 + b"\r\n"),
        HANDSHAKE.replace(KEY, KEY + b"x: y\r\n" * 200),
        HANDSHAKE + PING,
    ],
)
async def test_what_is_no_handshake_is_answered_once_over_http(gateway: Gateway, request_bytes: bytes) -> None:
    closing = request_bytes.replace(b"connection: Upgrade", b"connection: Upgrade, close", 1)
    answer = await said(gateway, closing)

    assert answer.startswith(b"HTTP/1.1 "), answer
    assert not answer.startswith(b"HTTP/1.1 101 ")
    assert answer.count(b"HTTP/1.1 ") == 1
    assert gateway.metrics.unhandled_errors == 0


async def test_a_handshake_behind_another_request_is_answered_over_http(gateway: Gateway) -> None:
    first = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n"
    answer = await said(gateway, first + HANDSHAKE.replace(b"connection: Upgrade", b"connection: Upgrade, close"))

    assert answer.count(b"HTTP/1.1 ") == 2
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b" 101 " not in answer


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        # A frame without a mask, a reserved opcode, a control frame that is too long, and text that is not UTF-8.
        (b"\x81\x02hi", 1002),
        (b"\x83\x82\x00\x00\x00\x00hi", 1002),
        (b"\x89\xfe\x00\x80\x00\x00\x00\x00" + b"x" * 128, 1002),
        (b"\x81\x82\x00\x00\x00\x00\xff\xff", 1007),
    ],
)
async def test_a_wrong_frame_ends_the_connection(gateway: Gateway, frames: bytes, code: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    async with asyncio.timeout(patient(20)):
        writer.write(HANDSHAKE)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(frames)
        answer = await reader.read()
    writer.close()

    assert answer[:1] == b"\x88"
    assert int.from_bytes(answer[2:4], "big") == code
    await until(lambda: gateway.metrics.websockets() == 0)
    assert gateway.metrics.unhandled_errors == 0
