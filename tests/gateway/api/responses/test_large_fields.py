"""Large fields of a request in the events of its stream: where they are, how they are sent, and what they hold."""

import asyncio
import json
import socket
import threading
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from gateway.api.common import serve
from gateway.api.responses import encoder, response
from gateway.config.settings import ServerConfig
from gateway.http import connection_limits
from gateway.http.bodies import SLICE_BYTES
from gateway.http.connection import GuardedProtocol
from gateway.http.sse import StreamTiming, respond_stream
from gateway.http.websocket import GuardedWebSocket
from tests.gateway.api.responses.test_endpoints import FUNCTION, PATH, TEXT, asking, events
from tests.gateway.api.responses.test_retrieval import MIB, used_bytes
from tests.gateway.api.responses.test_socket import ENDS, connected, left_nothing
from tests.gateway.harness import DEADLINE_S, Gateway, running, until
from tests.support.scale import patient

pytestmark = pytest.mark.anyio

# Longer than the system's buffers take if the client does not read.
LARGE: Final = f"{'x' * 62}ü\n" * (8 * MIB // 64)
# Frames of a chunk or of a message.
FRAMING_BYTES: Final = 64
SERVER: Final = ServerConfig(max_body_bytes=20 * MIB)
QUICK: Final = StreamTiming(hold_s=0.02, keepalive_s=0.02)


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


class _Transport:
    """A transport that notes the sizes of what is written to it."""

    def __init__(self, transport: asyncio.Transport, sizes: list[int]) -> None:
        self._transport = transport
        self._sizes = sizes

    def write(self, data: bytes) -> None:
        self._sizes.append(len(data))
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


@asynccontextmanager
async def cold(home: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[tuple[Gateway, list[int]], None]:
    """A gateway whose model loads for a while, with keep-alives in short intervals, and the sizes of its writes."""
    sizes: list[int] = []

    class Protocol(GuardedProtocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(_Transport(transport, sizes))  # type: ignore[arg-type]

    async def respond(*arguments: Any) -> Any:
        generation, encoder, receive, send, _, kind, on_progress, slice_events = arguments
        return await respond_stream(generation, encoder, receive, send, QUICK, kind, on_progress, slice_events)

    monkeypatch.setattr(serve, "respond_stream", respond)
    monkeypatch.setattr(connection_limits, "WRITE_TIMEOUT_S", 600.0)
    async with running(
        home, ["--load-s", str(patient(1.5))], server=SERVER, worker="talkative", protocol=Protocol
    ) as gateway:
        yield gateway, sizes


def large_fields() -> dict[str, Any]:
    parameters = {"type": "object", "properties": {}, "description": LARGE[: MIB // 4]}
    return {"instructions": LARGE, "tools": [FUNCTION | {"parameters": parameters}], "user": LARGE[: MIB // 4]}


async def test_a_stream_that_waits_does_not_repeat_large_fields_and_encodes_them_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = Counter[int]()

    def encode(value: Any) -> bytes:
        data = json_encode(value)
        encoded[len(data)] += len(data) >= SLICE_BYTES
        return data

    json_encode = encoder._encode  # type: ignore[reportPrivateUsage]
    monkeypatch.setattr(encoder, "_encode", encode)
    asked = large_fields()
    async with cold(tmp_path, monkeypatch) as (gateway, sizes):
        text = (await gateway.client.post(PATH, json=asking(TEXT, stream=True, **asked))).text
        found = events(text)
        repeated = [event for event in found[2:] if event["type"] == "response.in_progress"]

        assert [event["sequence_number"] for event in found] == list(range(len(found)))
        assert [event["type"] for event in (*found[:2], found[-1])] == [
            "response.created",
            "response.in_progress",
            "response.completed",
        ]
        for event in (*found[:2], found[-1]):
            assert {name: event["response"][name] for name in ("instructions", "user")} == {
                name: asked[name] for name in ("instructions", "user")
            }
            assert event["response"]["tools"][0]["parameters"] == asked["tools"][0]["parameters"]
        whole = {name: value for name, value in found[1]["response"].items() if name != "user"}
        assert repeated
        assert all(event["response"] == whole | {"instructions": None, "tools": []} for event in repeated)
        assert sorted(encoded.values()) == [0] * (len(encoded) - 3) + [1] * 3
        assert max(sizes) <= SLICE_BYTES + FRAMING_BYTES
        await until(lambda: not used_bytes(gateway))


async def test_small_fields_are_repeated_by_each_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"instructions": "x" * 60_000, "tools": [FUNCTION], "metadata": {"a": "b"}}
    async with cold(tmp_path, monkeypatch) as (gateway, _):
        found = events((await gateway.client.post(PATH, json=asking(TEXT, stream=True, **asked))).text)

    waiting = [event["response"] for event in found if event["type"] == "response.in_progress"]
    assert len(waiting) > 1
    assert all(response == waiting[0] for response in waiting)
    assert waiting[0]["instructions"] == asked["instructions"]


async def test_a_client_that_does_not_read_holds_its_body_and_a_few_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = json.dumps(asking(TEXT, stream=True, instructions=LARGE)).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    async with cold(tmp_path, monkeypatch) as (gateway, sizes):
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", gateway.port))
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(patient(DEADLINE_S)):
                await loop.sock_sendall(client, f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
                assert await loop.sock_recv(client, 12) == b"HTTP/1.1 200"
            await until(lambda: sum(sizes) > 2 * SLICE_BYTES)
            written = 0
            while written != (written := sum(sizes)):  # noqa: ASYNC110 - nothing tells that no more is written
                await asyncio.sleep(0.1)

            # The rest of the first of three events with the field waits for the client.
            assert SLICE_BYTES < written < len(LARGE)
            assert max(sizes) <= SLICE_BYTES + FRAMING_BYTES
            assert len(body) <= used_bytes(gateway) <= len(body) + 3 * SLICE_BYTES
        await until(lambda: not used_bytes(gateway) and not gateway.link.in_flight)


async def test_a_field_that_grows_beyond_its_body_is_reserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Each tool has its defaults in the response, which is more than the whole body.
    tools = [{"type": "function", "name": f"{number:064}"} for number in range(512)]
    held: list[int] = []
    encode = encoder.with_gaps

    def with_gaps(response: Any) -> Any:
        held.append(used_bytes(gateway))
        return encode(response)

    monkeypatch.setattr("gateway.api.responses.encoder.with_gaps", with_gaps)
    async with cold(tmp_path, monkeypatch) as (gateway, _):
        body = asking(TEXT, stream=True, tools=tools)
        found = events((await gateway.client.post(PATH, json=body)).text)
        assert [len(event["response"]["tools"]) for event in (*found[:2], found[-1])] == [512] * 3
        echoed = json.dumps(found[0]["response"]["tools"], separators=(",", ":"))
        assert min(held) >= len(echoed) > max(SLICE_BYTES, len(json.dumps(body)))
        await until(lambda: not used_bytes(gateway))


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of what is encoded on the event loop for events and answers."""
    sizes: list[int] = []

    def noted(encode: Any) -> Any:
        def note(value: Any) -> bytes:
            data = encode(value)
            if threading.current_thread() is threading.main_thread():
                sizes.append(len(data))
            return data

        return note

    for module in (response, encoder, encoder):
        monkeypatch.setattr(module, "_encode", noted(module._encode))  # type: ignore[reportPrivateUsage]
    return sizes


async def test_events_of_a_background_response_encode_no_large_field_on_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoded: list[int]
) -> None:
    asked = large_fields()
    async with cold(tmp_path, monkeypatch) as (gateway, sizes):
        answer = await gateway.client.post(PATH, json=asking(TEXT, stream=True, background=True, **asked))
        text = answer.text.replace(": keep-alive\n\n", "")
        found = [event["response"] for event in events(text) if "response" in event]
        kept = (await gateway.client.get(f"{PATH}/{found[0]['id']}")).json()
        await until(lambda: not used_bytes(gateway))

    assert [each["status"] for each in found] == ["queued", "queued", "in_progress", "completed"]
    for each in (*found, kept):
        assert {name: each[name] for name in ("instructions", "user")} == {
            name: asked[name] for name in ("instructions", "user")
        }
        assert each["tools"][0]["parameters"] == asked["tools"][0]["parameters"]
    assert encoded
    assert max(encoded) < SLICE_BYTES
    assert max(sizes) <= SLICE_BYTES + FRAMING_BYTES


async def test_a_whole_answer_has_no_second_copy_of_large_fields_and_comes_in_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoded: list[int]
) -> None:
    asked = large_fields()
    async with cold(tmp_path, monkeypatch) as (gateway, sizes):
        answer = await gateway.client.post(PATH, json=asking(TEXT, **asked))
        found, stored = answer.json(), (await gateway.client.get(f"{PATH}/{answer.json()['id']}")).json()
        await until(lambda: not used_bytes(gateway))

    assert found == stored
    assert (found["instructions"], found["user"]) == (asked["instructions"], asked["user"])
    assert int(answer.headers["content-length"]) == len(answer.content)
    assert encoded
    assert max(encoded) < SLICE_BYTES
    assert max(sizes) <= SLICE_BYTES + FRAMING_BYTES


async def test_a_large_item_in_the_middle_of_a_stream_comes_in_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "x" * (SLICE_BYTES // 2)
    said = [*[["reasoning", words], ["wait"]] * 4, ["text", "a"], ["wait"], ["text", "b"], ["finish", "stop"]]
    async with cold(tmp_path, monkeypatch) as (gateway, sizes):
        found = events((await gateway.client.post(PATH, json=asking(said, stream=True))).text)

    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    whole = next(event["item"] for event in found if event["type"] == "response.output_item.done")
    assert whole["content"][0]["text"] == 4 * words
    assert found[-1]["response"]["output"][1]["content"][0]["text"] == "ab"
    assert max(sizes) <= SLICE_BYTES + FRAMING_BYTES


# -- WebSockets ------------------------------------------------------------------------------------------------------


async def test_messages_with_large_fields_come_in_frames_and_no_other_message_within_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, frames = large_fields(), list[int]()
    async with cold(tmp_path, monkeypatch) as (gateway, _), connected(gateway, max_queue=1) as client:
        await client.create(**asked, stream_id="large")
        await client.create(stream_id="small")
        found: dict[str, list[Any]] = {"large": [], "small": []}
        async with asyncio.timeout(patient(DEADLINE_S)):
            while any(not each or each[-1]["type"] not in ENDS for each in found.values()):
                texts = [str(text) async for text in client.connection.recv_streaming()]
                frames += map(len, texts)
                event = json.loads("".join(texts))
                found[event["stream_id"]].append(event)

        for each in found.values():
            assert [event["sequence_number"] for event in each] == list(range(len(each)))
            assert each[-1]["type"] == "response.completed"
            assert each[0]["headers"]["x-request-id"]
            assert "headers" not in each[1]
        for event in (*found["large"][:2], found["large"][-1]):
            assert event["response"]["instructions"] == LARGE
            assert event["response"]["user"] == asked["user"]
        waiting = [event["response"] for event in found["large"][2:] if event["type"] == "response.in_progress"]
        assert waiting
        assert all(response["instructions"] is None for response in waiting)
        assert max(frames) <= SLICE_BYTES + FRAMING_BYTES
    await left_nothing(gateway)


async def test_steering_is_accepted_between_the_events_of_a_large_response(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces: list[tuple[bytes, bool]] = []
    send_piece = GuardedWebSocket.send_piece

    async def noted(self: GuardedWebSocket, data: bytes, *, is_first: bool, is_last: bool) -> None:
        pieces.append((data, is_first))
        await send_piece(self, data, is_first=is_first, is_last=is_last)

    monkeypatch.setattr(GuardedWebSocket, "send_piece", noted)
    steering = {"type": "response.steer", "input": "more"}
    async with cold(tmp_path, monkeypatch) as (gateway, _), connected(gateway, max_queue=1) as client:
        await client.create(instructions=LARGE)
        await until(lambda: bool(pieces))
        response_id = json.loads(pieces[0][0].partition(b',"created_at"')[0].partition(b'"response":')[2] + b"}")["id"]
        await client.send(**steering, previous_response_id=response_id)
        found = await client.until("response.steer.accepted")

    assert [event["type"] for event in found[:2]] == ["response.created", "response.in_progress"]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    await left_nothing(gateway)


async def test_a_client_that_leaves_within_a_large_message_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cold(tmp_path, monkeypatch) as (gateway, _):
        async with connected(gateway, max_queue=1) as client:
            await client.create(instructions=LARGE)
            await client.create(stream_id="b")
            await anext(aiter(client.connection.recv_streaming()))
            client.connection.transport.abort()
        await left_nothing(gateway)
        await until(lambda: not gateway.link.in_flight)
