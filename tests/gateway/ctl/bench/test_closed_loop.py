"""The client and the closed loop, against a small scripted HTTP server."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from gateway.ctl.bench.closed_loop import (
    BenchConnection,
    BenchLoad,
    BenchRequest,
    Reply,
    Report,
    Target,
    closed_loop,
    report,
)

T = TypeVar("T")
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
OLD_HEAD = b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
EVENT = b'data: {"choices":[{"text":"word"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2}}\n\n'
DONE = b"data: [DONE]\n\n"
BUSY = b"HTTP/1.1 429 Too Many Requests\r\nretry-after: 3\r\ncontent-length: 2\r\n\r\n{}"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


async def read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length"))
    return await reader.readexactly(length)


async def against(handler: Handler, use: Callable[[Target], Awaitable[T]]) -> T:
    """Call `use` with a server that has closed all its sockets afterwards."""
    handled: list[asyncio.Task[None]] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handler(reader, writer)
        finally:
            writer.close()
            await writer.wait_closed()

    def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handled.append(asyncio.ensure_future(accept(reader, writer)))

    async with await asyncio.start_server(accepted, "127.0.0.1", 0) as server:
        result = await use(Target("127.0.0.1", server.sockets[0].getsockname()[1]))
        await asyncio.gather(*handled)
        return result


async def one_request(target: Target) -> Reply:
    connection = BenchConnection(target)
    reply = await connection.request("/v1/completions", b"{}", timeout_s=5)
    await connection.close()
    return reply


def answer_of(*parts: bytes) -> Reply:
    """The reply to a server that writes these bytes, one write each, and closes."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)

    return asyncio.run(against(handler, one_request))


def test_a_stream_split_at_every_byte_gives_the_same_events() -> None:
    whole = HEAD + chunk(EVENT + b": keep-alive\n\n") + chunk(EVENT + USAGE) + chunk(DONE) + b"0\r\n\r\n"
    reply = answer_of(*(whole[at : at + 1] for at in range(len(whole))))
    assert reply.ok
    assert reply.texts == ["word", "word"]
    assert (reply.prompt_tokens, reply.completion_tokens, len(reply.times)) == (7, 2, 2)


def test_a_stream_that_ends_with_its_connection_is_whole() -> None:
    assert answer_of(OLD_HEAD, EVENT + DONE).ok


def test_a_stream_without_done_is_an_error() -> None:
    assert "without [DONE]" in answer_of(OLD_HEAD, EVENT).error


def test_a_connection_lost_inside_a_stream_is_an_error() -> None:
    assert "connection lost" in answer_of(HEAD, chunk(EVENT)).error


def test_a_refusal_keeps_its_status_and_headers() -> None:
    reply = answer_of(BUSY)
    assert not reply.ok
    assert (reply.status, reply.headers["retry-after"], reply.body) == (429, "3", b"{}")


def test_an_error_event_fails_the_request() -> None:
    assert "boom" in answer_of(OLD_HEAD, b'data: {"error":{"message":"boom"}}\n\n' + DONE).error


def test_a_server_that_is_not_there_is_an_error() -> None:
    assert asyncio.run(one_request(Target("127.0.0.1", 1))).error.startswith("connect:")


def test_the_closed_loop_never_has_more_requests_open_than_clients_and_runs_all_jobs() -> None:
    open_now, most, seen = 0, 0, []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal open_now, most
        while not reader.at_eof():
            try:
                seen.append(await read_request(reader))
            except asyncio.IncompleteReadError:
                break
            open_now += 1
            most = max(most, open_now)
            for _ in range(20):  # lets the other clients in
                await asyncio.sleep(0)
            open_now -= 1
            writer.write(HEAD + chunk(EVENT + EVENT + USAGE + DONE) + b"0\r\n\r\n")

    async def scenario(target: Target) -> Report:
        wall_s, replies = await closed_loop(BenchLoad(target, "m"), [BenchRequest(f"p{at}", 2) for at in range(9)], 3)
        return report(3, wall_s, replies)

    folded = asyncio.run(against(handler, scenario))
    assert (folded.requests, folded.errors, folded.completion_tokens, folded.prompt_tokens) == (9, 0, 18, 63)
    assert folded.events_per_token == 1.0
    assert most == 3
    assert len(seen) == 9


def test_failed_requests_count_as_errors_and_give_no_tokens() -> None:
    good = Reply(sent=0.0, ended=1.0, status=200, times=[0.5, 0.75], completion_tokens=2, is_done=True)
    bad = Reply(sent=0.0, ended=1.0, status=503, completion_tokens=50, body=b"no")
    folded = report(2, 2.0, [good, bad])
    assert (folded.errors, folded.completion_tokens, folded.tokens_per_s) == (1, 2, 1.0)
    assert folded.first_errors == ["HTTP 503: no"]
    assert (folded.ttft_ms.p50, folded.itl_ms.p50, folded.e2e_ms.count) == (500.0, 250.0, 1)
