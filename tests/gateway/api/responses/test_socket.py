"""WebSockets at `/v1/responses`, by the `websockets` client and the official one."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import openai
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from gateway.access.key import Key, KeyFile
from gateway.api.responses import response_socket
from gateway.config.settings import ServerConfig
from gateway.http import connection_limits
from gateway.request import body_memory
from tests.gateway.api.responses.test_endpoints import CALL, FUNCTION, PATH, TEXT, events
from tests.gateway.harness import Gateway, running, until
from tests.support.scale import patient

pytestmark = pytest.mark.anyio

# How a real worker ends a request that only fills the prefix cache.
NO_TOKEN = [["finish", "length"]]
ENDS = ("response.completed", "response.incomplete", "response.failed", "error", "response.steer.failed")


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Gateway, None]:
    server = ServerConfig(max_body_bytes=400_000)
    home = tmp_path_factory.mktemp("g")
    async with running(home, ["--step-ms", "1"], server=server, worker="talkative") as running_gateway:
        yield running_gateway


class Client:
    """A client that keeps what it gets."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection

    async def send(self, **fields: Any) -> None:
        await self.connection.send(json.dumps(fields))

    async def create(self, said: Any = TEXT, **fields: Any) -> None:
        text = said if isinstance(said, str) else json.dumps(said)
        await self.send(**{"type": "response.create", "model": "m", "input": text} | fields)

    async def next(self) -> Any:
        async with asyncio.timeout(patient(30)):
            return json.loads(await self.connection.recv())

    async def until(self, *kinds: str) -> list[Any]:
        """The events up to the first of one of these kinds."""
        found = [await self.next()]
        async with asyncio.timeout(patient(30)):
            while found[-1]["type"] not in kinds:
                found.append(await self.next())
        return found

    async def answer(self, said: Any = TEXT, **fields: Any) -> Any:
        """The last event of a new response."""
        await self.create(said, **fields)
        return (await self.until(*ENDS))[-1]


@asynccontextmanager
async def connected(gateway: Gateway, path: str = PATH, **options: Any) -> AsyncGenerator[Client, None]:
    url = gateway.url.replace("http", "ws", 1) + path
    async with connect(url, max_size=None, open_timeout=patient(10), **options) as connection:
        yield Client(connection)


def text_of(response: Any) -> str:
    return "".join(part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])


async def left_nothing(gateway: Gateway) -> None:
    await until(lambda: gateway.link.in_flight == 0 and gateway.metrics.websockets() == 0)
    numbers = gateway.metrics.body_numbers
    assert numbers is not None
    await until(lambda: numbers.used_bytes == 0)


# -- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", [TEXT, CALL, [["text", "a"], ["finish", "length"]]])
async def test_the_events_are_those_of_a_stream_by_post(gateway: Gateway, script: list[list[str]]) -> None:
    fields = {"tools": [FUNCTION], "metadata": {"a": "b"}, "seed": 7, "unknown": 1}
    body = {"model": "m", "input": json.dumps(script), "stream": True} | fields
    posted = await gateway.client.post(PATH, json=body)
    async with connected(gateway) as client:
        await client.create(script, **fields)
        found = await client.until(*ENDS)

    headers = found[0].pop("headers")
    assert headers["x-mlxd-ignored"] == posted.headers["x-mlxd-ignored"] == "unknown"
    assert headers["x-mlxd-seed"] == "7"
    assert headers["x-request-id"].endswith(".1")
    assert _plain(found) == _plain(events(posted.text))
    await left_nothing(gateway)


def _plain(found: list[Any]) -> list[Any]:
    """Events without the deltas' boundaries, ids and times, which differ from one answer to the next."""
    text = json.dumps([each for each in found if not each["type"].endswith("delta")])
    for stem in {each["response"]["id"].removeprefix("resp_") for each in found if "response" in each}:
        text = text.replace(stem, "STEM")
    plain = json.loads(text)
    for each in plain:
        each.pop("sequence_number")
        for name in ("created_at", "completed_at"):
            each.get("response", {}).pop(name, None)
    return plain


async def test_events_are_numbered_without_a_gap(gateway: Gateway) -> None:
    async with connected(gateway) as client:
        await client.create(CALL, tools=[FUNCTION])
        numbers = [each["sequence_number"] for each in await client.until(*ENDS)]

    assert numbers == list(range(len(numbers)))


async def test_a_conversation_of_the_official_client(gateway: Gateway) -> None:
    async with (
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="x", max_retries=0) as client,
        client.responses.connect() as connection,
    ):
        await connection.response.create(model="m", input=json.dumps(CALL), tools=[cast(Any, FUNCTION)], store=False)
        first = await _ended(connection)
        call = first.output[-1]
        assert (call.type, call.name, call.arguments) == ("function_call", "f", '{"a": 1}')
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "4"}
        again = {"role": "user", "content": json.dumps(TEXT)}
        await connection.response.create(
            model="m", previous_response_id=first.id, input=[cast(Any, output), cast(Any, again)], store=False
        )
        second = await _ended(connection)

    assert second.output_text == "Hello"
    assert second.previous_response_id == first.id


async def _ended(connection: Any) -> Any:
    async with asyncio.timeout(patient(30)):
        async for event in connection:
            assert event.type != "error", event
            if event.type == "response.completed":
                return event.response
    raise AssertionError("the connection ended before the response")


async def test_a_response_that_is_not_stored_is_continued_on_its_socket_only(gateway: Gateway) -> None:
    async with connected(gateway) as client, connected(gateway) as other:
        first = (await client.answer(store=False))["response"]
        missed = await other.answer(previous_response_id=first["id"], store=False)
        second = (await client.answer(previous_response_id=first["id"], store=False))["response"]
        gone = await client.answer(previous_response_id=first["id"], store=False)

    assert (missed["status"], missed["error"]["code"]) == (400, "previous_response_not_found")
    assert second["previous_response_id"] == first["id"]
    # Only the newest response of a stream is kept.
    assert gone["error"]["code"] == "previous_response_not_found"
    assert (await gateway.client.get(f"{PATH}/{second['id']}")).status_code == 404
    await left_nothing(gateway)


async def test_stored_responses_are_continued_on_any_socket_and_by_post(gateway: Gateway) -> None:
    posted = (await gateway.client.post(PATH, json={"model": "m", "input": json.dumps(TEXT)})).json()
    async with connected(gateway) as client:
        second = (await client.answer(previous_response_id=posted["id"]))["response"]
    body = {"model": "m", "input": json.dumps(TEXT), "previous_response_id": second["id"]}
    third = await gateway.client.post(PATH, json=body)

    assert third.status_code == 200
    items = (await gateway.client.get(f"{PATH}/{third.json()['id']}/input_items")).json()["data"]
    assert len(items) == 5


async def test_a_failed_continuation_evicts_what_it_continued(gateway: Gateway) -> None:
    async with connected(gateway) as client:
        first = (await client.answer(store=False))["response"]
        refused = await client.answer(previous_response_id=first["id"], input=[{"type": "hologram"}])
        gone = await client.answer(previous_response_id=first["id"])

        forked = (await client.answer(store=False))["response"]
        failing = [["finish", "error"]]
        failed = await client.answer(failing, previous_response_id=forked["id"], store=False, stream_id="b")
        kept = await client.answer(previous_response_id=forked["id"], store=False)

    assert (refused["status"], refused["error"]["param"]) == (400, "input[0].type")
    assert gone["error"]["code"] == "previous_response_not_found"
    assert (failed["type"], failed["status"], failed["stream_id"]) == ("error", 500, "b")
    assert kept["type"] == "response.completed"


async def test_a_prewarmed_prompt_is_continued(gateway: Gateway) -> None:
    async with connected(gateway) as client:
        await client.create(NO_TOKEN, generate=False, store=False)
        found = await client.until(*ENDS)
        warm = found[-1]["response"]
        answer = (await client.answer(previous_response_id=warm["id"], store=False))["response"]

    assert [each["type"] for each in found] == ["response.created", "response.in_progress", "response.completed"]
    assert (warm["status"], warm["output"], warm["usage"]["output_tokens"]) == ("completed", [], 0)
    assert text_of(answer) == "Hello"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_is_prewarmed_by_post(gateway: Gateway, stream: bool) -> None:
    body = {"model": "m", "input": json.dumps(NO_TOKEN), "generate": False, "stream": stream}
    answer = await gateway.client.post(PATH, json=body)
    warm = events(answer.text)[-1]["response"] if stream else answer.json()

    assert (answer.status_code, warm["status"], warm["output"]) == (200, "completed", [])


# -- streams ---------------------------------------------------------------------------------------------------------


async def test_streams_run_at_the_same_time_and_each_in_order(gateway: Gateway) -> None:
    async with connected(gateway) as client:
        await client.create("go on", stream_id="long")
        await client.until("response.output_text.delta")
        await client.create(stream_id="long")
        await client.create(stream_id="short", input=json.dumps([["text", "x"], ["finish", "stop"]]))
        short = await client.until("response.completed")
        await client.send(type="response.cancel", stream_id="long")
        first = await client.until("response.incomplete")
        second = await client.until("response.completed")

    assert short[-1]["stream_id"] == "short"
    assert {each["stream_id"] for each in first + second} == {"long"}
    assert first[-1]["response"]["status"] == "cancelled"
    assert text_of(second[-1]["response"]) == "Hello"
    await left_nothing(gateway)


async def test_the_number_of_streams_is_limited(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_socket, "NAMED_STREAMS_MAX", 3)
    monkeypatch.setattr(response_socket, "RUNNING_MAX", 2)
    async with connected(gateway) as client:
        for number in range(3):
            await client.create("go on", stream_id=f"s{number}")
        await client.create(stream_id="one-more")
        error = (await client.until("error"))[-1]
        await client.create(stream_id="no spaces")
        invalid = (await client.until("error"))[-1]
        # This many run; the others wait.
        await until(lambda: gateway.link.in_flight == 2)
        await client.send(type="response.cancel", stream_id="s0")
        await client.until("response.incomplete")
        while (await client.next()).get("stream_id") != "s2":
            pass

    assert (error["error"]["code"], error["stream_id"]) == ("websocket_stream_limit_reached", "one-more")
    assert invalid["error"]["code"] == "invalid_stream_id"
    await left_nothing(gateway)


async def test_the_number_of_waiting_requests_is_limited(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_socket, "WAITING_MAX", 1)
    async with connected(gateway) as client:
        for _ in range(3):
            await client.create("go on")
        error = (await client.until("error"))[-1]

    assert error["status"] == 429
    await left_nothing(gateway)


async def test_cancelling_frees_the_row(gateway: Gateway) -> None:
    async with connected(gateway) as client:
        await client.create("go on")
        created = (await client.until("response.output_text.delta"))[0]
        await client.send(type="response.cancel", response_id=created["response"]["id"])
        last = (await client.until(*ENDS))[-1]
        await until(lambda: gateway.link.in_flight == 0)
        await client.send(type="response.cancel", response_id=created["response"]["id"])
        again = await client.next()

    assert (last["type"], last["response"]["status"]) == ("response.incomplete", "cancelled")
    assert (again["status"], again["error"]["code"]) == (404, "response_not_found")


@pytest.mark.parametrize("is_graceful", [True, False])
async def test_a_client_that_leaves_in_the_middle_leaves_nothing(gateway: Gateway, is_graceful: bool) -> None:
    async with connected(gateway) as client:
        await client.create("go on")
        await client.create("go on", stream_id="b")
        await client.create("go on", stream_id="b")
        await client.until("response.output_text.delta")
        if not is_graceful:
            client.connection.transport.abort()
    await left_nothing(gateway)


# -- steering --------------------------------------------------------------------------------------------------------


async def test_steering_keeps_what_was_said_and_goes_on(gateway: Gateway) -> None:
    async with connected(gateway) as client:
        await client.create("go on", store=False, instructions="Be brief.", metadata={"a": "b"}, stream_id="s")
        target = (await client.until("response.output_text.delta"))[0]["response"]["id"]
        await client.send(type="response.steer", previous_response_id=target, input=json.dumps(TEXT))
        steered = await client.until("response.incomplete")
        accepted = next(each for each in steered if each["type"] == "response.steer.accepted")
        after = await client.until("response.completed")

    said = steered[-1]["response"]
    assert (said["status"], said["incomplete_details"]) == ("incomplete", {"reason": "steered"})
    assert said["output"][0]["status"] == "incomplete"
    assert text_of(said).startswith("t0 ")
    # The item ends before its response does, and no number is missing.
    kinds = [each["type"] for each in steered]
    assert kinds[-4:-1] == ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
    numbers = [each["sequence_number"] for each in steered]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert accepted["steer"]["previous_response_id"] == target
    assert accepted["steer"]["id"].startswith("steer_")

    last = after[-1]["response"]
    assert after[0]["type"] == "response.created"
    assert (last["previous_response_id"], text_of(last)) == (target, "Hello")
    assert (last["instructions"], last["metadata"], after[-1]["stream_id"]) == ("Be brief.", {"a": "b"}, "s")
    await left_nothing(gateway)


@pytest.mark.parametrize("store", [True, False])
async def test_a_fork_of_a_running_answer_begins_with_what_was_said(gateway: Gateway, store: bool) -> None:
    endless = [["text", "once "], ["progress"]]
    async with connected(gateway) as client:
        await client.create(endless, store=store)
        begun = await client.until("response.output_text.delta")
        target = begun[0]["response"]["id"]
        await client.create(store=store, stream_id="b", previous_response_id=target)
        fork = (await client.until("response.completed"))[-1]["response"]
        assert (fork["previous_response_id"], text_of(fork)) == (None, "Hello")
        # The fork is continued from what it had, while its origin still runs.
        again = await client.answer(stream_id="b", previous_response_id=fork["id"], store=store)
        assert again["response"]["status"] == "completed"
        if store:
            listed = (await gateway.client.get(f"{PATH}/{fork['id']}/input_items", params={"order": "asc"})).json()
            assert [item["role"] for item in listed["data"]] == ["user", "assistant", "user"]
            assert (listed["data"][1]["content"][0]["text"], listed["data"][1]["status"]) == ("once ", "incomplete")
        await client.send(type="response.cancel", response_id=target)
        assert text_of((await client.until("response.incomplete"))[-1]["response"]) == "once "
    await left_nothing(gateway)


async def test_steering_waits_for_the_output_of_a_tool(gateway: Gateway, tmp_path: Path) -> None:
    script = [["tool", "f", '{"a": 1}'], ["hold", str(tmp_path / "go")], ["finish", "tool_calls"]]
    async with connected(gateway) as client:
        await client.create(script, tools=[FUNCTION])
        found = await client.until("response.function_call_arguments.done")
        target = found[0]["response"]["id"]
        message = {"role": "user", "content": [{"type": "input_text", "text": "first"}]}
        await client.send(type="response.steer", previous_response_id=target, input=[message])
        await client.until("response.steer.accepted")
        (tmp_path / "go").touch()
        ended = await client.until("response.completed")
        pending = await client.next()
        output = {"type": "function_call_output", "call_id": "call_0", "output": "4"}
        asked = {"role": "user", "content": json.dumps(TEXT)}
        answer = await client.answer(previous_response_id=target, input=[output, asked])
        items = (await gateway.client.get(f"{PATH}/{answer['response']['id']}/input_items?order=asc")).json()["data"]

    assert ended[-1]["response"]["status"] == "completed"
    assert (pending["type"], pending["reason"]) == ("response.steer.pending", "waiting_for_required_input")
    assert pending["required_input"] == [{"type": "function_call_output", "call_id": "call_0", "name": "f"}]
    assert pending["sequence_number"] == ended[-1]["sequence_number"] + 1
    assert text_of(answer["response"]) == "Hello"
    assert [each["type"] for each in items] == [
        "message",
        "function_call",
        "message",
        "function_call_output",
        "message",
    ]


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"input": "x"}, "response_not_found"),
        ({"input": []}, "invalid_input"),
        ({"input": [{"role": "system", "content": "x"}]}, "invalid_input"),
        ({"input": "x", "stream_id": "s"}, "invalid_input"),
        ({}, "invalid_input"),
    ],
)
async def test_steering_that_cannot_be_is_given_back(gateway: Gateway, fields: dict[str, Any], code: str) -> None:
    async with connected(gateway) as client:
        await client.send(type="response.steer", previous_response_id="resp_x", **fields)
        failed = await client.next()

    assert (failed["type"], failed["error"]["code"]) == ("response.steer.failed", code)
    assert failed["steer"] == {"previous_response_id": "resp_x", "input": fields.get("input")}


async def test_an_ended_response_cannot_be_steered(gateway: Gateway) -> None:
    async with connected(gateway) as client:
        target = (await client.answer())["response"]["id"]
        await client.send(type="response.steer", previous_response_id=target, input="x")
        failed = await client.next()

    assert failed["error"]["code"] == "response_already_completed"


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "status", "what"),
    [
        ("{nope", 400, "not a valid event"),
        ("[]", 400, "not a valid event"),
        ("{}", 400, "'type'"),
        ("[" * 100_000, 400, "not a valid event"),
        (b"{}", 400, "Binary"),
        ('{"type": "session.update"}', 400, "response.create"),
        ('{"type": "response.create", "model": "m"}', 400, "'input'"),
        ('{"type": "response.create", "model": "none", "input": "x"}', 404, "'none'"),
        ('{"type": "response.create", "model": "m", "input": "x", "background": true}', 400, "'background'"),
        ('{"type": "response.create", "model": "m", "input": "x", "stream": false}', 400, "'stream'"),
        ('{"type": "response.create", "model": "m", "input": "x", "n": 2}', 400, "'n'"),
    ],
)
async def test_a_message_that_is_wrong_is_an_error_and_the_socket_stays(
    gateway: Gateway, message: str | bytes, status: int, what: str
) -> None:
    async with connected(gateway) as client:
        await client.connection.send(message)
        error = await client.next()
        answer = await client.answer()

    assert (error["type"], error["status"]) == ("error", status)
    assert what in error["error"]["message"]
    assert answer["type"] == "response.completed"


async def test_a_message_that_is_too_large_ends_the_socket(gateway: Gateway) -> None:
    async with connected(gateway) as client:
        await client.create("x" * 500_000)
        await client.connection.wait_closed()

    assert client.connection.close_code == 1009
    await left_nothing(gateway)


async def test_a_message_in_fragments_is_one_message(gateway: Gateway) -> None:
    fields = {"type": "response.create", "model": "m", "input": json.dumps(TEXT), "user": "é" * 100_000}
    text = json.dumps(fields, ensure_ascii=False)
    async with connected(gateway) as client:
        await client.connection.send(text[at : at + 30_000] for at in range(0, len(text), 30_000))
        last = (await client.until(*ENDS))[-1]

    assert text_of(last["response"]) == "Hello"
    await left_nothing(gateway)


async def test_the_number_of_fragments_is_limited(gateway: Gateway) -> None:
    async with connected(gateway) as client:
        with contextlib.suppress(ConnectionClosed):
            await client.connection.send("" for _ in range(6000))
        await client.connection.wait_closed()

    assert client.connection.close_code == 1008


async def test_who_may_not_post_gets_the_same_refusal_before_the_upgrade(tmp_path: Path) -> None:
    async with running(tmp_path, ["--step-ms", "1"], worker="talkative") as gateway:
        for headers, status in (({"Origin": "http://evil.example"}, 403), ({"Host": "evil.example"}, 421)):
            with pytest.raises(InvalidStatus) as caught:
                async with connected(gateway, additional_headers=headers):
                    pass
            assert caught.value.response.status_code == status
        file = KeyFile(tmp_path / "keys" / "keys.json")
        _, secret = file.create(Key(name="ada", prefix="", salt="", hash=""))
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            with pytest.raises(InvalidStatus) as caught:
                async with connected(gateway, additional_headers=headers):
                    pass
            posted = await gateway.client.post(PATH, json={}, headers=headers)
            refusal = caught.value.response
            assert refusal.status_code == posted.status_code == 401
            assert json.loads(refusal.body or b"") == posted.json()
            assert refusal.headers["www-authenticate"] == posted.headers["www-authenticate"]
        async with connected(gateway, additional_headers={"Authorization": f"Bearer {secret}"}) as client:
            assert (await client.answer())["type"] == "response.completed"
            file.revoke("ada")
            await until(lambda: _is_closed_to(gateway, secret))
            assert (await client.answer())["status"] == 401


def _is_closed_to(gateway: Gateway, secret: str) -> bool:
    gateway.app.services.keyring.refresh()
    return gateway.app.services.keyring.caller(secret.encode()) is None


# -- bounds and ends -------------------------------------------------------------------------------------------------


async def test_a_client_that_does_not_read_is_bounded_and_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_limits, "WRITE_TIMEOUT_S", 0.5)
    async with running(tmp_path, worker="talkative") as gateway:
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.setblocking(False)
        await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", gateway.port))
        async with connected(gateway, sock=raw, ping_interval=None) as client:
            client.connection.transport.pause_reading()
            # Its first event is larger than the buffers of the system.
            await client.create("go on", store=False, instructions="x" * 6_000_000)
            await until(lambda: gateway.metrics.connections_dropped["write_timeout"] == 1)
            client.connection.transport.abort()
        await left_nothing(gateway)


async def test_conversations_of_all_sockets_share_a_part_of_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body_memory, "part_of_machine_bytes", lambda: 400_000)
    server = ServerConfig(max_body_bytes=100_000)
    async with (
        running(tmp_path, ["--step-ms", "1"], server=server, worker="talkative") as gateway,
        connected(gateway) as first,
        connected(gateway) as second,
    ):
        # A conversation includes the instructions' size, as a request's body does.
        old = (await first.answer(store=False, instructions="x" * 60_000))["response"]
        new = (await second.answer(store=False, instructions="x" * 60_000))["response"]
        dropped = await first.answer(previous_response_id=old["id"], store=False)
        kept = await second.answer(previous_response_id=new["id"], store=False)

    assert dropped["error"]["code"] == "previous_response_not_found"
    assert kept["type"] == "response.completed"


async def test_messages_reserve_their_memory_as_they_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_memory, "MEMORY_WAIT_S", 0.05)
    released = asyncio.Event()

    async def unfinished() -> AsyncGenerator[str, None]:
        yield "x" * 300_000
        await released.wait()
        yield ""

    monkeypatch.setattr(body_memory, "part_of_machine_bytes", lambda: 600_000)
    server = ServerConfig(max_body_bytes=600_000)
    async with (
        running(tmp_path, server=server, worker="talkative") as gateway,
        connected(gateway) as first,
        connected(gateway) as second,
    ):
        numbers = gateway.metrics.body_numbers
        assert numbers is not None
        sending = asyncio.create_task(first.connection.send(unfinished()))
        await until(lambda: numbers.used_bytes >= 300_000)
        with contextlib.suppress(ConnectionClosed):
            await second.connection.send("x" * 550_000)
        await second.connection.wait_closed()
        released.set()
        await sending
        await first.until("error")
        await until(lambda: numbers.used_bytes == 0)

    assert second.connection.close_code == 1013


async def test_a_drain_closes_idle_sockets_at_once_and_others_after_their_response(tmp_path: Path) -> None:
    async with running(tmp_path, ["--step-ms", "1"], worker="talkative") as gateway, connected(gateway) as idle:
        async with connected(gateway) as busy:
            await busy.create("go on")
            created = (await busy.until("response.output_text.delta"))[0]
            gateway.app.drain()
            await idle.connection.wait_closed()
            await busy.create(stream_id="new")
            refused = (await busy.until("error"))[-1]
            await busy.send(type="response.cancel", response_id=created["response"]["id"])
            last = (await busy.until("response.incomplete"))[-1]
            await busy.connection.wait_closed()
        with pytest.raises(InvalidStatus) as caught:
            async with connected(gateway):
                pass

    assert idle.connection.close_code == busy.connection.close_code == 1001
    assert (refused["status"], refused["error"]["code"]) == (503, "draining")
    assert last["response"]["status"] == "cancelled"
    assert caught.value.response.status_code == 503


async def test_a_socket_ends_at_its_greatest_age(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_socket, "AGE_MAX_S", 0.05)
    async with connected(gateway) as client:
        error = await client.next()
        await client.connection.wait_closed()

    assert error["error"]["code"] == "websocket_connection_limit_reached"
    assert client.connection.close_code == 1001


async def test_a_stream_goes_on_after_its_worker_was_killed(tmp_path: Path) -> None:
    async with running(tmp_path, ["--step-ms", "5"], worker="talkative") as gateway, connected(gateway) as client:
        await client.create("go on", max_output_tokens=60)
        found = await client.until("response.output_text.delta")
        gateway.pool.worker("m").kill()
        found += await client.until(*ENDS)

    assert text_of(found[-1]["response"]) == "".join(f"t{number} " for number in range(60))
    assert [each["sequence_number"] for each in found] == list(range(len(found)))


async def test_other_handshakes_stay_http(gateway: Gateway) -> None:
    for path in ("/v1/chat/completions", "/v1/models"):
        with pytest.raises(InvalidStatus):
            async with connected(gateway, path):
                pass
    async with connected(gateway, "/responses") as client:
        assert (await client.answer())["type"] == "response.completed"
