"""Large bodies: what is made of them is what is made of small ones, beside the event loop and in bounded memory."""

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.access.key import Key, KeyFile
from gateway.api.common.decode import BIAS_BYTES_MAX, JSON_MAX, PIECE_BYTES, UNKNOWN_BYTES_MAX, count_json
from gateway.api.openai.request import ChatCompletionRequest, decode_chat, decode_completion
from gateway.api.responses.request import decode_responses
from gateway.config.settings import ServerConfig
from gateway.errors import ApiError, BadRequest, BodyTooLarge
from gateway.request import body_memory
from gateway.request.body_memory import LARGE_BYTES, Bodies
from tests.gateway.harness import Gateway, chat, running, until
from tests.support.scale import patient

PATH = "/v1/chat/completions"
TEXT = st.text(st.sampled_from('ab"\\,[]{}:é\n'), max_size=6)
VALUE = st.recursive(
    st.none() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Gateway, None]:
    async with running(tmp_path_factory.mktemp("g"), ["--step-ms", "1"]) as made:
        yield made


# -- structure -------------------------------------------------------------------------------------------------------


def structure(value: Any) -> tuple[int, int, int]:
    if not isinstance(value, list | dict):
        return 0, 0, 0
    inner = [structure(one) for one in (value.values() if isinstance(value, dict) else value)]
    containers, commas, keys = (sum(one[at] for one in inner) for at in range(3))
    return 1 + containers, max(0, len(value) - 1) + commas, (len(value) if isinstance(value, dict) else 0) + keys


@given(VALUE, st.integers(1, 40), st.booleans())
def test_structure_is_counted_exactly_in_windows_of_any_size(value: Any, window: int, is_ascii: bool) -> None:
    body = json.dumps(value, ensure_ascii=is_ascii).encode()
    assert count_json(body, window) == structure(value)


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages":[' + b",".join([b"{}"] * (JSON_MAX.containers + 1)) + b"]}",
        b'{"chat_template_kwargs":{"a":[' + b",".join([b"[]"] * (JSON_MAX.containers + 1)) + b"]}}",
        b'{"prompt":[' + b",".join([b"1"] * (JSON_MAX.values + 2)) + b"]}",
        b"{" + b",".join(b'"%d":1' % number for number in range(JSON_MAX.keys + 1)) + b"}",
    ],
)
def test_a_body_of_more_values_than_a_conversation_has_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest) as caught:
        decode_chat(body)
    assert caught.value.code == "body_too_complex"


# -- decoding in pieces ----------------------------------------------------------------------------------------------


def large(**fields: Any) -> dict[str, Any]:
    """A conversation that is decoded in pieces."""
    text = 'x,[{"\\' * 40
    messages: list[dict[str, Any]] = [{"role": "user", "content": text} for _ in range(PIECE_BYTES // 100)]
    messages[7] = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": {"name": "f"}}]}
    messages[9] = {"role": "user", "content": [{"type": "text", "text": "é" * (2 * PIECE_BYTES)}]}
    return {"messages": messages, "model": "m", "temperature": 0.5} | fields


def test_a_body_decoded_in_pieces_is_what_it_is_decoded_at_once() -> None:
    body = json.dumps(large(stop=["a"], nobody_knows=1), ensure_ascii=False).encode()
    assert len(body) > 4 * PIECE_BYTES
    request, unknown = decode_chat(body)
    assert request == msgspec.json.decode(body, type=ChatCompletionRequest)
    assert unknown == ["nobody_knows"]


def test_what_is_wrong_in_a_piece_is_named_as_in_the_whole() -> None:
    fields = large()
    at = len(fields["messages"]) - 3
    fields["messages"][at]["content"] = 7
    fields["messages"][at - 1]["odd"] = 1
    with pytest.raises(BadRequest) as caught:
        decode_chat(json.dumps(fields).encode())
    assert caught.value.param == f"messages[{at}].content"

    fields["messages"][at]["content"] = "good"
    assert decode_chat(json.dumps(fields).encode())[1] == ["messages.odd"]


def test_a_large_input_of_the_responses_api_is_decoded_in_pieces_too() -> None:
    text = "y" * PIECE_BYTES
    items = [{"role": "user", "content": f"{number}{text}"} for number in range(4)]
    request, _ = decode_responses(json.dumps({"model": "m", "input": items}).encode())
    assert [item.content for item in request.items] == [item["content"] for item in items]
    request, _ = decode_responses(json.dumps({"model": "m", "input": text * 3}).encode())
    assert request.input == text * 3


@pytest.mark.parametrize("where", ["body", "message"])
def test_fields_that_nobody_knows_are_bounded(where: str) -> None:
    fields = large()
    (fields if where == "body" else fields["messages"][5])["nobody_knows"] = "z" * UNKNOWN_BYTES_MAX
    with pytest.raises(BadRequest, match="bytes of unknown fields"):
        decode_chat(json.dumps(fields).encode())
    # What is known to do nothing may be as large as it likes.
    decode_chat(json.dumps(large(metadata={"a": "z" * UNKNOWN_BYTES_MAX})).encode())


def test_a_bias_is_bounded_before_it_is_decoded() -> None:
    bias = {str(number): 1 for number in range(BIAS_BYTES_MAX // 6)}
    with pytest.raises(BadRequest) as caught:
        decode_completion(json.dumps({"model": "m", "prompt": "a", "logit_bias": bias}).encode())
    assert caught.value.param == "logit_bias"


# -- beside the event loop -------------------------------------------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.parametrize("path", [PATH, "/v1/completions", "/v1/messages", "/v1/responses", "/tokenize"])
async def test_large_bodies_and_no_small_ones_are_worked_on_beside_the_loop(gateway: Gateway, path: str) -> None:
    numbers = gateway.app.services.bodies.numbers

    async def ask(text: str) -> None:
        content = {"prompt": text, "input": text, "messages": [{"role": "user", "content": text}]}
        wanted = {"/v1/completions": ["prompt"], "/v1/responses": ["input"], "/tokenize": ["prompt"]}
        fields = {name: content[name] for name in wanted.get(path, ["messages"])} | {"model": "m"}
        if path != "/tokenize":
            fields |= {"max_output_tokens" if path == "/v1/responses" else "max_tokens": 2}
        answer = await gateway.client.post(path, json=fields)
        assert answer.status_code == 200, answer.text

    before = numbers.offloaded
    await ask("small")
    assert numbers.offloaded == before
    await ask("x" * LARGE_BYTES)
    # Decoded and lowered; what the Responses API echoes is made there too.
    assert numbers.offloaded >= before + 2


@pytest.mark.anyio
async def test_more_sequences_than_the_model_takes_are_refused_before_any_is_made(gateway: Gateway) -> None:
    first = gateway.link.next_rid()
    body = {"model": "m", "prompt": ["a"] * 4096, "n": 16}
    answer = await gateway.client.post("/v1/completions", json=body)

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
    assert gateway.metrics.model("m").rejections["too_many_sequences"] == 1
    assert gateway.link.next_rid() == first + 1


# -- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_who_finds_no_room_waits_in_order_of_arrival() -> None:
    room = Bodies(lambda: 100)
    held, large, small = room.lease(), room.lease(), room.lease()
    await held.reach(60)
    waiting = [asyncio.create_task(large.reach(70)), asyncio.create_task(small.reach(10))]
    await asyncio.sleep(0)
    assert [task.done() for task in waiting] == [False, False]
    held.close()
    await asyncio.gather(*waiting)
    assert room.numbers.used_bytes == 80
    large.close()
    small.close()
    assert room.numbers.used_bytes == 0
    room.close()


@pytest.mark.anyio
async def test_who_waits_too_long_is_told_to_come_again_and_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_memory, "MEMORY_WAIT_S", 0.01)
    room = Bodies(lambda: 100)
    held, late, cancelled = room.lease(), room.lease(), room.lease()
    await held.reach(60)
    with pytest.raises(ApiError) as caught:
        await late.reach(50)
    assert (caught.value.status, caught.value.code) == (503, "body_memory_full")
    assert caught.value.retry_after_s > 0
    with pytest.raises(BodyTooLarge):
        await late.reach(101)
    left = asyncio.create_task(cancelled.reach(50))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.wait([left])
    assert (room.numbers.used_bytes, room.numbers.refused) == (60, 1)
    held.close()
    await late.reach(100)
    assert room.numbers.used_bytes == 100
    room.close()


@pytest.mark.anyio
async def test_a_small_body_passes_large_ones_that_wait() -> None:
    room = Bodies(lambda: 4 * LARGE_BYTES)
    held, large, small = room.lease(), room.lease(), room.lease()
    await held.reach(2 * LARGE_BYTES)
    waiting = asyncio.create_task(large.reach(3 * LARGE_BYTES))
    await asyncio.sleep(0)
    async with asyncio.timeout(0):
        await small.reach(LARGE_BYTES)
    assert not waiting.done()
    held.close()
    await waiting
    large.close()
    small.close()
    assert room.numbers.used_bytes == 0
    room.close()


@pytest.mark.anyio
async def test_an_owner_at_its_share_waits_for_itself_and_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_memory, "MEMORY_WAIT_S", 0.01)
    room = Bodies(lambda: 10 * LARGE_BYTES, lambda: 5 * LARGE_BYTES)
    first, second, other = room.lease(), room.lease(), room.lease()
    first.owner = second.owner = "alice"
    other.owner = "bob"
    await first.reach(4 * LARGE_BYTES)
    with pytest.raises(ApiError, match="this key's") as caught:
        await second.reach(2 * LARGE_BYTES)
    assert (caught.value.status, caught.value.code) == (503, "body_memory_full")
    monkeypatch.setattr(body_memory, "MEMORY_WAIT_S", 60.0)
    waiting = asyncio.create_task(second.reach(2 * LARGE_BYTES))
    await asyncio.sleep(0)
    await other.reach(5 * LARGE_BYTES)
    assert not waiting.done()
    first.close()
    await waiting
    assert room.numbers.used_bytes == 7 * LARGE_BYTES
    room.close()


def test_a_key_has_half_of_the_memory_while_there_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_memory, "part_of_machine_bytes", lambda: 10_000)
    server = ServerConfig(max_body_bytes=1024)
    assert [body_memory.quota_bytes(server, has_others) for has_others in (True, False)] == [5000, 10_000]
    assert body_memory.quota_bytes(ServerConfig(max_body_bytes=4000), True) == 8000


def test_the_memory_for_bodies_holds_at_least_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_memory, "part_of_machine_bytes", lambda: 10_000)
    assert body_memory.memory_bytes(ServerConfig(max_body_bytes=20_000)) == 20_000


@pytest.mark.anyio
async def test_large_bodies_that_one_key_announces_cost_another_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_memory, "MEMORY_WAIT_S", 0.05)
    file = KeyFile(tmp_path / "keys" / "keys.json")
    alice, bob = (file.create(Key(name=name, prefix="", salt="", hash=""))[1] for name in ("alice", "bob"))
    monkeypatch.setattr(body_memory, "part_of_machine_bytes", lambda: 32 * LARGE_BYTES)
    server = ServerConfig(max_body_bytes=16 * LARGE_BYTES)
    async with running(tmp_path, ["--step-ms", "1"], server=server) as gateway:
        numbers = gateway.metrics.body_numbers
        begun = [await begin(gateway, 16 * LARGE_BYTES, alice) for _ in range(8)]
        await until(lambda: numbers.used_bytes >= 8 * LARGE_BYTES)
        answer = await gateway.client.post(PATH, json=chat(), headers={"authorization": f"Bearer {bob}"})
        assert answer.status_code == 200, answer.text
        for _, writer in begun:
            writer.close()
        await until(lambda: numbers.used_bytes == 0)


async def begin(gateway: Gateway, size: int, secret: str = "") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A request whose body has been announced and does not come."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {size}\r\n"
    writer.write((head + (f"authorization: Bearer {secret}\r\n" if secret else "") + "\r\n{").encode())
    return reader, writer


@pytest.mark.anyio
async def test_bodies_that_never_end_take_no_more_than_their_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_memory, "MEMORY_WAIT_S", 0.05)
    monkeypatch.setattr(body_memory, "part_of_machine_bytes", lambda: 3000)
    server = ServerConfig(max_body_bytes=1000)
    async with running(tmp_path, ["--step-ms", "1"], server=server) as gateway:
        numbers = gateway.metrics.body_numbers
        begun = [await begin(gateway, 1000) for _ in range(3)]
        await until(lambda: numbers.used_bytes == 3000)
        answer = await gateway.client.post(PATH, json=chat())
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "body_memory_full")
        assert int(answer.headers["retry-after"]) >= 1
        begun[0][1].close()
        await until(lambda: numbers.used_bytes == 2000)
        assert (await gateway.client.post(PATH, json=chat())).status_code == 200
        for _, writer in begun:
            writer.close()
        await until(lambda: numbers.used_bytes == 0)


@pytest.mark.anyio
async def test_a_body_counts_until_its_request_has_ended(tmp_path: Path) -> None:
    async with running(tmp_path, ["--step-ms", "20"]) as gateway:
        numbers = gateway.metrics.body_numbers
        async with gateway.client.stream("POST", PATH, json=chat(stream=True, max_tokens=10_000)) as answer:
            async for _ in answer.aiter_lines():
                break
            assert numbers.used_bytes > 0
        await until(lambda: numbers.used_bytes == 0)


@pytest.mark.anyio
async def test_a_key_sends_no_more_bodies_at_once_than_it_may_run(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys" / "keys.json")
    _, secret = file.create(Key(name="alice", prefix="", salt="", hash="", concurrency=1))
    async with running(tmp_path, ["--step-ms", "1"]) as gateway:
        headers = {"authorization": f"Bearer {secret}"}
        _, writer = await begin(gateway, 1000, secret)
        await until(lambda: gateway.metrics.body_numbers.used_bytes == 1000)
        answer = await gateway.client.post(PATH, json=chat(), headers=headers)
        assert answer.status_code == 429
        writer.close()
        await until(lambda: gateway.metrics.body_numbers.used_bytes == 0)
        assert (await gateway.client.post(PATH, json=chat(), headers=headers)).status_code == 200


@pytest.mark.anyio
async def test_the_body_of_a_request_too_many_is_not_waited_for(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys" / "keys.json")
    _, secret = file.create(Key(name="alice", prefix="", salt="", hash="", concurrency=1))
    async with running(tmp_path, ["--step-ms", "20"]) as gateway:
        headers = {"authorization": f"Bearer {secret}"}
        request = chat(stream=True, max_tokens=10_000)
        async with gateway.client.stream("POST", PATH, json=request, headers=headers) as answer:
            async for _ in answer.aiter_lines():
                break
            reader, writer = await begin(gateway, 1000, secret)
            async with asyncio.timeout(patient(60)):
                head = await reader.readuntil(b"\r\n")
            assert b" 429 " in head
            writer.close()


@pytest.mark.anyio
async def test_room_that_is_given_as_the_wait_for_it_ends_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_memory, "MEMORY_WAIT_S", 0.0)
    room = Bodies(lambda: 10)
    assert room.take("", 10, is_small=True)
    lease = room.lease()

    waiting = asyncio.create_task(lease.reach(10))
    # After the wait begins, and before its end is noticed.
    asyncio.get_running_loop().call_soon(room.give_back, "", 10)
    await waiting
    lease.close()

    assert room.numbers.used_bytes == 0
    room.close()
