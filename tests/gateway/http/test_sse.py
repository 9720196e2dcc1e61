import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from starlette.types import Message

from gateway.api.openai.chat_and_completions import ChatStream
from gateway.api.openai.choices import Heading
from gateway.errors import ApiError
from gateway.http.direct_write import DirectWriter
from gateway.http.sse import StreamTiming, StreamWatch, respond_stream
from gateway.request.generation import Generation
from gateway.request.record import RequestRecord
from protocol.from_worker import Delta
from protocol.to_worker import Generate, Sampling, TextPrompt
from tests.gateway.harness import Gateway, events, running, until
from tests.support.scale import patient

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Client:
    """The other end of an ASGI connection."""

    def __init__(self) -> None:
        self.left = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()
        self.messages: list[Message] = []
        # Whether a `send` waits for the client to read.
        self.is_awaited = False

    async def receive(self) -> Message:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.is_awaited = not self.reads.is_set()
        await self.reads.wait()
        self.is_awaited = False
        self.messages.append(message)

    @property
    def text(self) -> str:
        return b"".join(m["body"] for m in self.messages if m["type"] == "http.response.body").decode()


# -- the watch -------------------------------------------------------------------------------------------------------


async def test_a_client_that_leaves_cuts_the_work_off_and_nothing_else() -> None:
    client = Client()
    async with StreamWatch(client.receive) as watch:
        client.left.set()
        await asyncio.Event().wait()

    assert watch.reason == "disconnect"
    assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]


async def test_work_that_ends_is_not_cut_off() -> None:
    client = Client()
    async with StreamWatch(client.receive) as watch:
        await asyncio.sleep(0)

    client.left.set()
    await asyncio.sleep(0)
    assert watch.reason is None


async def test_a_cancellation_from_outside_goes_through() -> None:
    client = Client()

    async def work() -> None:
        async with StreamWatch(client.receive):
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_exception_goes_through() -> None:
    with pytest.raises(RuntimeError):
        async with StreamWatch(Client().receive):
            raise RuntimeError("boom")


async def test_a_send_that_blocks_for_too_long_cuts_the_work_off() -> None:
    client = Client()
    client.reads.clear()
    async with asyncio.timeout(patient(5)), StreamWatch(client.receive, 0.02) as watch:
        watch.is_sending = True
        await client.send({"type": "http.response.body"})

    assert watch.reason == "write_timeout"


async def test_sends_that_go_on_are_never_cut_off() -> None:
    async with StreamWatch(Client().receive, 0.005) as watch:
        until = asyncio.get_running_loop().time() + 0.03
        while asyncio.get_running_loop().time() < until:
            watch.is_sending = True
            await asyncio.sleep(0)
            watch.is_sending = False
            watch.sent += 1

    assert watch.reason is None


# -- a stream, from a real worker to a client that the test plays ----------------------------------------------------

# For tests that wait for the status line or for keep-alives.
QUICK = StreamTiming(hold_s=0.02, keepalive_s=0.01)


class Shortcut(DirectWriter):
    """The client's end of the short way."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.written = 0

    @property
    def is_open(self) -> bool:
        return self._client.reads.is_set()

    def write(self, data: bytes) -> None:
        self.written += 1
        self._client.messages.append({"type": "http.response.body", "body": data, "more_body": True})


async def respond(
    gateway: Gateway,
    client: Client,
    said: str,
    max_tokens: int = 3,
    outlet: DirectWriter | None = None,
    stream: type[ChatStream] = ChatStream,
    pace: StreamTiming | None = None,
) -> RequestRecord:
    """Answer one request of the text prompt `said`; without `pace` a slow machine reaches no limit of the stream."""
    pace = pace or StreamTiming(hold_s=patient(30), keepalive_s=patient(30))
    record = RequestRecord("id", "POST", "/v1/chat/completions", writer=outlet)
    encoder = stream(Heading("id", 0, "m", 1), False)
    generate = Generate(
        gateway.link.next_rid(), TextPrompt(said), Sampling(), max_tokens=max_tokens, want_progress=True
    )
    services = gateway.app.services
    with Generation(services, services.config.models["m"], [generate], record, encoder.bind) as generation:
        await respond_stream(generation, encoder, client.receive, client.send, pace)
    return record


def contents(client: Client) -> list[object]:
    return [e if e == "[DONE]" else e["choices"][0]["delta"].get("content") for e in events(client.text)]


def script(*parts: list[str]) -> str:
    return json.dumps(parts)


async def warm(gateway: Gateway) -> None:
    await gateway.pool.load("m")


async def test_the_first_event_carries_the_role_and_the_text_in_one_write(tmp_path: Path) -> None:
    async with running(tmp_path, worker="talkative") as gateway:
        await warm(gateway)
        client = Client()
        await respond(gateway, client, script(["text", "hi"], ["wait"], ["finish", "stop"]))

        assert client.messages[0]["type"] == "http.response.start"
        assert client.messages[1]["body"].count(b"data: ") >= 2
        assert [text for text in contents(client) if text] == ["hi", "[DONE]"]
        assert contents(client)[-2:] == [None, "[DONE]"]
        assert client.messages[-1]["more_body"] is False


async def test_tokens_take_the_short_way_and_a_client_that_pauses_still_has_each_once(tmp_path: Path) -> None:
    said = [event for index in range(60) for event in (["text", f"{index} "], ["wait"])]
    async with running(tmp_path, worker="talkative") as gateway:
        await warm(gateway)
        client = Client()
        outlet = Shortcut(client)
        task = asyncio.create_task(respond(gateway, client, script(*said, ["finish", "stop"]), outlet=outlet))
        for count in (4, 8, 12):
            await until(lambda count=count: outlet.written >= count)
            client.reads.clear()
            await until(lambda: client.is_awaited)
            client.reads.set()
        await task

        texts = "".join(str(text) for text in contents(client)[:-2])
        assert texts.split() == [str(index) for index in range(60)]
        assert contents(client)[-2:] == [None, "[DONE]"]
        # Nothing but the beginning, the end and what came in a pause went the long way.
        assert 12 <= outlet.written <= len(client.messages) - 6


async def test_the_status_waits_for_the_first_event_so_that_a_refusal_can_be_one(tmp_path: Path) -> None:
    async with running(tmp_path, worker="talkative") as gateway:
        await warm(gateway)
        client = Client()
        with pytest.raises(ApiError) as caught:
            await respond(gateway, client, "refused")

        assert caught.value.status == 400
        assert client.messages == []


async def test_progress_on_the_prompt_keeps_the_client_waiting(tmp_path: Path) -> None:
    async with running(tmp_path, worker="talkative") as gateway:
        await warm(gateway)
        client = Client()
        steps = [tmp_path / name for name in "abcd"]
        works = [event for step in steps for event in (["progress"], ["hold", str(step)])]
        said = script(*works, ["text", "x"], ["finish", "stop"])
        task = asyncio.create_task(respond(gateway, client, said, pace=QUICK))
        for count, step in enumerate(steps, 1):
            await until(lambda count=count: len(contents(client)) >= count)
            step.touch()
        await task

        # The role, keep-alives while it worked, then the text.
        assert contents(client)[:3] == ["", "", ""]
        assert contents(client)[-3:] == ["x", None, "[DONE]"]


async def test_a_worker_that_shows_no_life_is_not_kept_alive(tmp_path: Path) -> None:
    async with running(tmp_path, worker="talkative") as gateway:
        await warm(gateway)
        client = Client()
        task = asyncio.create_task(respond(gateway, client, "ignored", pace=QUICK))
        await until(lambda: len(client.messages) >= 2)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await asyncio.shield(task)
        client.left.set()
        record = await task

        # The role, and at most the sign of life that accepting it was.
        assert len(contents(client)) <= 2
        assert record.outcome == "disconnect"


async def test_steps_for_others_keep_a_client_waiting_whose_turn_has_not_come(tmp_path: Path) -> None:
    async with running(tmp_path, ["--step-ms", "5"], worker="talkative") as gateway:
        await warm(gateway)
        waiting, busy = Client(), Client()
        others = asyncio.create_task(respond(gateway, busy, "talk", max_tokens=1_000_000))
        task = asyncio.create_task(respond(gateway, waiting, "ignored", pace=QUICK))
        await until(lambda: len(contents(waiting)) > 5)
        busy.left.set()
        await others
        waiting.left.set()
        await task

        assert set(contents(waiting)) == {""}


async def test_a_loading_model_keeps_the_client_waiting(tmp_path: Path) -> None:
    async with running(tmp_path, ["--load-s", str(patient(0.3))], worker="talkative") as gateway:
        client = Client()
        await respond(gateway, client, script(["text", "x"], ["finish", "stop"]), pace=QUICK)

        assert contents(client)[:4] == ["", "", "", ""]
        assert contents(client)[-3:] == ["x", None, "[DONE]"]


async def test_a_load_that_fails_late_is_an_event_and_has_no_end_mark(tmp_path: Path) -> None:
    async with running(tmp_path, ["--exit-on-load", "66", "--goodbye-code", "20"], worker="talkative") as gateway:
        client = Client()
        record = await respond(gateway, client, "anything", pace=QUICK)

        assert "[DONE]" not in client.text
        assert events(client.text)[-1]["error"]["code"] == "model_missing"
        assert client.messages[-1]["more_body"] is False
        assert record.outcome == "model_missing"


async def test_text_before_a_failure_is_delivered_before_the_error(tmp_path: Path) -> None:
    async with running(tmp_path, worker="talkative") as gateway:
        await warm(gateway)
        client, is_read = Client(), tmp_path / "read"
        said = script(["text", "a"], ["hold", str(is_read)], ["text", "b"], ["finish", "abort"])
        task = asyncio.create_task(respond(gateway, client, said))
        await until(lambda: "a" in contents(client))
        is_read.touch()
        await task

        told = events(client.text)
        text = "".join(event["choices"][0]["delta"]["content"] for event in told[:-1])
        assert text == "ab"
        assert told[-1]["error"]["code"] == "aborted"


async def test_a_fault_after_the_first_byte_is_an_error_event_and_no_end(tmp_path: Path) -> None:
    class Faulty(ChatStream):
        def encode(self, deltas: Sequence[Delta]) -> bytes:
            if any(delta.text == "b" for delta in deltas):
                raise ZeroDivisionError
            return super().encode(deltas)

    async with running(tmp_path, worker="talkative") as gateway:
        await warm(gateway)
        client, is_read = Client(), tmp_path / "read"
        said = script(["text", "a"], ["hold", str(is_read)], ["text", "b"], ["finish", "stop"])
        task = asyncio.create_task(respond(gateway, client, said, stream=Faulty))
        await until(lambda: "a" in contents(client))
        is_read.touch()
        with pytest.raises(ZeroDivisionError):
            await task

        assert "[DONE]" not in client.text
        assert events(client.text)[-1]["error"]["code"] == "internal"
        assert client.messages[-1]["more_body"] is False
