import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from gateway.http import connection_limits
from gateway.http.connection import HEAD_BYTES_MAX, LATE_BYTES_MAX, PIPELINED_MAX, TRAILER_BYTES_MAX, GuardedProtocol
from tests.gateway.harness import DEADLINE_S, Gateway, chat, running, until
from tests.support.scale import patient

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


class Hearing(GuardedProtocol):
    """Tells when a piece has been parsed, so that the next is a piece of its own."""

    heard = 0

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        Hearing.heard += len(data)


@pytest.fixture(scope="module")
async def hearing(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Gateway, None]:
    async with running(tmp_path_factory.mktemp("h"), ["--step-ms", "1"], protocol=Hearing) as running_gateway:
        yield running_gateway


async def in_pieces(gateway: Gateway, *pieces: bytes) -> list[bytes]:
    """The answers' status lines and bodies, up to the end of the connection, which the last piece must ask for."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    Hearing.heard = 0
    sent = 0
    async with asyncio.timeout(patient(DEADLINE_S)):
        for piece in pieces:
            writer.write(piece)
            sent += len(piece)
            while Hearing.heard < sent:  # noqa: ASYNC110 - a turn of the loop, not a while
                await asyncio.sleep(0)
        answers = await reader.read(-1)
    writer.close()
    return [line + body for line, body in _split(answers)]


def _split(answers: bytes) -> list[tuple[bytes, bytes]]:
    found: list[tuple[bytes, bytes]] = []
    while answers:
        head, _, rest = answers.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        found.append((head.partition(b"\r\n")[0] + b" ", rest[:length]))
        answers = rest[length:]
    return found


def chunked(body: bytes, size: int = 20) -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x;name=value\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


async def flood(gateway: Gateway, start: bytes, piece: bytes, most: int) -> tuple[int, bytes]:
    """Send `piece` again and again until the server ends the connection. Returns what was sent and what was said."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(start)
    said = asyncio.create_task(reader.read(-1))
    sent = 0
    async with asyncio.timeout(patient(DEADLINE_S)):
        with contextlib.suppress(ConnectionError):
            while not said.done() and sent < most:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
                sent += len(piece)
        writer.close()
        with contextlib.suppress(ConnectionError):
            return sent, await said
    return sent, b""


def post(body: dict[str, object]) -> bytes:
    data = json.dumps(body).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
    return head % len(data) + data


async def exchange(gateway: Gateway, *pieces: bytes, end: bytes = b"\r\n") -> bytes:
    """The beginning of the first answer: its status line, or with an empty line for its `end` its head."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    try:
        async with asyncio.timeout(patient(DEADLINE_S)):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            return await reader.readuntil(end)
    finally:
        writer.close()


async def test_headers_of_an_ordinary_client_pass(gateway: Gateway) -> None:
    padding = b"x-a: " + b"a" * 30_000 + b"\r\n"
    assert b" 200 " in await exchange(gateway, b"GET /livez HTTP/1.1\r\nhost: localhost\r\n", padding, b"\r\n")


@pytest.mark.parametrize(
    "request_head",
    [
        b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close", b"nonsense",
        b"GET /nowhere HTTP/1.1\r\nhost: localhost\r\nconnection: close",
        b"GET /livez HTTP/1.1\r\nhost: elsewhere\r\nconnection: close", b"CONNECT x:1 HTTP/1.1\r\nhost: x:1",
    ],
)  # fmt: skip
async def test_no_answer_can_be_taken_for_a_page(gateway: Gateway, request_head: bytes) -> None:
    answer = await exchange(gateway, request_head, b"\r\n\r\n", end=b"\r\n\r\n")
    assert answer.count(b"\r\nx-content-type-options: nosniff\r\n") == 1


@pytest.mark.parametrize("pieces", [1, 7, 40])
async def test_headers_that_are_too_large_are_a_431(gateway: Gateway, pieces: int) -> None:
    length = HEAD_BYTES_MAX // pieces + 100
    one = (
        [b"x-a: " + b"a" * (length * pieces) + b"\r\n\r\n"]
        if pieces == 1
        else [b"x-a: " + b"a" * length + b"\r\n"] * pieces
    )

    assert b" 431 " in await exchange(gateway, b"GET /livez HTTP/1.1\r\nhost: localhost\r\n", *one)


async def test_a_header_without_an_end_does_not_grow_in_memory(gateway: Gateway) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(b"GET /livez HTTP/1.1\r\nx-a: ")
    sent = 0
    async with asyncio.timeout(patient(DEADLINE_S)):
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
    request = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n"
    last = b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    writer.write(request * 20 + last)
    async with asyncio.timeout(patient(DEADLINE_S)):
        answers = await reader.read(-1)
    writer.close()

    assert answers.count(b"HTTP/1.1 200 OK") == 21


@pytest.mark.parametrize("said", [b"", b"GET /livez HT", b"\r\n\r\n", b"GET /livez HTTP/1.1\r\nx-a: 1\r\n"])
async def test_a_head_that_does_not_come_is_given_up(hasty: Gateway, said: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", hasty.port)
    writer.write(said)
    received = b""
    # Linux resets a connection that is closed before all that arrived was read: a busy loop may close it so.
    async with asyncio.timeout(patient(DEADLINE_S)):
        with contextlib.suppress(ConnectionResetError):
            received = await reader.read(-1)
    writer.close()

    assert received == b""


async def test_a_body_that_nobody_waits_for_cannot_hold_a_connection(hasty: Gateway) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", hasty.port)
    writer.write(b"POST /nope HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000\r\n\r\nabc")
    async with asyncio.timeout(patient(DEADLINE_S)):
        assert b"404" in await reader.readline()
        # Trickles on, and is cut off all the same.
        with contextlib.suppress(ConnectionError):
            while not reader.at_eof():
                writer.write(b"a")
                await reader.read(1000)
    writer.close()


async def test_an_answer_is_never_cut_off_by_the_time_for_a_head(hasty: Gateway) -> None:
    body = b'{"model": "m", "prompt": "hi", "max_tokens": 300, "stream": true}'
    reader, writer = await asyncio.open_connection("127.0.0.1", hasty.port)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body)
    writer.write(head + body + b"\r\n")
    async with asyncio.timeout(patient(DEADLINE_S)):
        answer = await reader.readuntil(b"[DONE]")
    writer.close()

    assert b"t299" in answer


@pytest.mark.parametrize("before", [b"", b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n"], ids=["first", "second"])
async def test_a_client_that_leaves_with_another_request_behind_its_stream_has_left(
    gateway: Gateway, before: bytes
) -> None:
    """The connection knows of its newest request, and the one that is answered is not that one."""
    request = post(chat(stream=True, max_tokens=100_000))
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(before + request)
    async with asyncio.timeout(patient(DEADLINE_S)):
        await reader.readuntil(b'"content":')
        writer.write(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")
        await writer.drain()
        await reader.readuntil(b'"content":')
        assert gateway.link.in_flight == 1
        writer.transport.abort()
        await until(lambda: gateway.link.in_flight == 0)
    assert gateway.metrics.unhandled_errors == 0


# -- trailers and framing --------------------------------------------------------------------------------------------

CHUNKED = b"POST %b HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
COMPLETION = json.dumps({"model": "m", "prompt": "hi", "max_tokens": 1}).encode()


async def test_trailers_are_no_headers(gateway: Gateway) -> None:
    whole = chunked(COMPLETION).removesuffix(b"\r\n") + b"content-encoding: gzip\r\n\r\n"
    assert b" 200 " in await exchange(gateway, CHUNKED % b"/v1/completions", whole)


@pytest.mark.parametrize("path", [b"/v1/completions", b"/nope"], ids=["awaited", "answered"])
@pytest.mark.parametrize(
    ("start", "piece"),
    [(b"", b"a: b\r\n" * 1000), (b"a: ", b"b" * 8000), (b"", b"b" * 8000)],
    ids=["many", "value", "name"],
)
async def test_trailers_without_an_end_are_cut_off(gateway: Gateway, path: bytes, start: bytes, piece: bytes) -> None:
    most = 100 * HEAD_BYTES_MAX
    sent, said = await flood(gateway, CHUNKED % path + b"0\r\n" + start, piece, most)

    assert sent < most
    assert said.count(b"HTTP/1.1 ") <= 1


async def test_trailers_of_an_ordinary_size_pass_in_one_packet(gateway: Gateway) -> None:
    trailer = b"a: %b\r\n" % (b"b" * (TRAILER_BYTES_MAX - 100))
    whole = chunked(COMPLETION).removesuffix(b"\r\n") + trailer + b"\r\n"
    assert b" 200 " in await exchange(gateway, CHUNKED % b"/v1/completions", whole)


async def test_a_chunk_extension_without_an_end_is_cut_off(gateway: Gateway) -> None:
    most = 100 * HEAD_BYTES_MAX
    sent, said = await flood(gateway, CHUNKED % b"/v1/completions" + b"5;a=", b"b" * 8000, most)

    assert sent < most
    assert said.count(b"HTTP/1.1 ") <= 1


async def test_many_small_fields_are_too_large(gateway: Gateway) -> None:
    assert b" 431 " in await exchange(gateway, b"GET /livez HTTP/1.1\r\n" + b"a:\r\n" * 5000 + b"\r\n")


async def test_a_late_body_ends_the_connection_when_it_is_long(gateway: Gateway) -> None:
    most = 100 * LATE_BYTES_MAX
    sent, said = await flood(
        gateway, b"POST /nope HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000000\r\n\r\n", b"a" * 8000, most
    )

    assert sent < most
    assert said.count(b"HTTP/1.1 ") == said.count(b" 404 ") == 1


# -- upgrades --------------------------------------------------------------------------------------------------------

LAST = b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
OFFER = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: %b\r\n"
UNKNOWN = b'{"model": "nobody", "prompt": "hi"}'
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n"


def offers() -> dict[str, tuple[bytes, bytes]]:
    """The request, and what its answer begins with."""
    plain, wrong, unknown = b"HTTP/1.1 200 OK ", b"HTTP/1.1 400 Bad Request ", b"HTTP/1.1 404 Not Found "
    sized = OFFER + b"content-length: %d\r\n\r\n%b"
    return {
        "h2c": (sized % (b"h2c", len(COMPLETION), COMPLETION), plain),
        # That there is no such model is known from the body.
        "websocket": (sized % (b"websocket", len(UNKNOWN), UNKNOWN), unknown),
        "chunked": (OFFER % b"h2c" + b"transfer-encoding: chunked\r\n\r\n" + chunked(UNKNOWN), unknown),
        "smuggled": (sized % (b"anything", len(SMUGGLED), SMUGGLED), wrong),
        "bodiless": (b"GET /livez HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\nhost: localhost\r\n\r\n", plain),
    }


@pytest.mark.parametrize("name", offers())
async def test_an_offer_to_upgrade_is_one_request_with_one_answer_however_it_is_split(
    hearing: Gateway, name: str
) -> None:
    request, status = offers()[name]
    for at in range(1, len(request)):
        answers = await in_pieces(hearing, request[:at], request[at:], LAST)

        assert len(answers) == 2, (at, answers)
        assert answers[0].startswith(status), (at, answers)
        assert answers[1].startswith(b"HTTP/1.1 200 OK "), (at, answers)
    assert hearing.metrics.unhandled_errors == 0


async def test_offers_to_upgrade_in_one_packet_are_all_answered(gateway: Gateway) -> None:
    request, _ = offers()["h2c"]
    answers = await in_pieces_of(gateway, request * 20 + LAST)

    assert [line for line, _ in answers] == [b"HTTP/1.1 200 OK "] * 21


async def test_a_tunnel_is_refused_and_nothing_in_it_is_a_request(gateway: Gateway) -> None:
    answers = await in_pieces_of(gateway, b"CONNECT x:443 HTTP/1.1\r\nhost: x:443\r\n\r\n" + LAST)

    assert [line for line, _ in answers] == [b"HTTP/1.1 405 Method Not Allowed "]


# -- HTTP/1.0 --------------------------------------------------------------------------------------------------------


async def test_a_stream_of_http_1_0_ends_with_the_connection_and_has_no_chunks(gateway: Gateway) -> None:
    body = json.dumps(chat(stream=True, max_tokens=5)).encode()
    request = b"POST /v1/chat/completions HTTP/1.0\r\nconnection: keep-alive\r\ncontent-length: %d\r\n\r\n%b"
    head, _, said = (await said_to(gateway, request % (len(body), body))).partition(b"\r\n\r\n")

    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert said.startswith(b"data: {")
    assert said.endswith(b"data: [DONE]\n\n")
    assert b"t4 " in said


async def test_a_whole_answer_of_http_1_0_has_its_length(gateway: Gateway) -> None:
    (answer,) = await in_pieces_of(gateway, b"GET /livez HTTP/1.0\r\n\r\n")

    assert answer[0] == b"HTTP/1.1 200 OK "


# -- pipelines -------------------------------------------------------------------------------------------------------


async def said_to(gateway: Gateway, data: bytes) -> bytes:
    """All that is answered to `data`, after which the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(data)
    async with asyncio.timeout(patient(DEADLINE_S)):
        said = await reader.read(-1)
    writer.close()
    return said


async def in_pieces_of(gateway: Gateway, data: bytes) -> list[tuple[bytes, bytes]]:
    return _split(await said_to(gateway, data))


async def test_of_too_many_requests_in_one_packet_the_first_are_answered(gateway: Gateway) -> None:
    answers = await in_pieces_of(gateway, b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n" * (PIPELINED_MAX * 3))

    assert [line for line, _ in answers] == [b"HTTP/1.1 200 OK "] * (PIPELINED_MAX + 1)


@pytest.mark.parametrize("behind", [b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\na: " + b"b" * 2 * HEAD_BYTES_MAX])
async def test_what_is_wrong_behind_a_stream_is_not_answered_within_it(gateway: Gateway, behind: bytes) -> None:
    request = post(chat(stream=True, max_tokens=300))
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(request)
    async with asyncio.timeout(patient(DEADLINE_S)):
        said = await reader.readuntil(b"t0 ")
        writer.write(behind)
        said += await reader.read(-1)
    writer.close()

    assert said.count(b"HTTP/1.1 ") == 1
    assert b"t299 " in said
    assert said.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize(
    "behind", [LAST, LAST * 3, LAST[:30], b"a" * 3 * HEAD_BYTES_MAX], ids=["one", "3", "part", "-"]
)
@pytest.mark.parametrize("is_reset", [False, True], ids=["closed", "reset"])
async def test_a_client_that_leaves_with_another_request_behind_a_whole_answer_has_left(
    gateway: Gateway, behind: bytes, is_reset: bool
) -> None:
    request = post(chat(max_tokens=1_000_000))
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(request)
    await until(lambda: gateway.link.in_flight == 1)
    writer.write(behind)
    async with asyncio.timeout(patient(DEADLINE_S)):
        await writer.drain()
    if is_reset:
        writer.transport.abort()
    else:
        writer.close()
    await until(lambda: gateway.link.in_flight == 0)


@pytest.mark.parametrize("last", [b"", LAST], ids=["kept", "closing"])
async def test_answers_that_are_never_read_end_with_the_write_timeout(
    tmp_path: Path, last: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than the system's buffers hold."""
    monkeypatch.setattr(connection_limits, "WRITE_TIMEOUT_S", patient(0.2))
    async with running(tmp_path) as gateway:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", gateway.port))
            client.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n" * (PIPELINED_MAX // 2) + last)
            count = gateway.metrics.connections["public"]
            await until(lambda: count() == 1)
            await until(lambda: count() == 0)
        assert gateway.metrics.connections_dropped["write_timeout"] == 1
