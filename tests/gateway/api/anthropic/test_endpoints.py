"""Anthropic's API over HTTP: a real gateway, scripted workers."""

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.api.anthropic.response import MessageStream
from gateway.config.settings import ModelConfig, ServerConfig
from gateway.http.sse import StreamTiming, respond_stream
from gateway.request.generation import Generation
from gateway.request.record import RequestRecord
from gateway.workers.supervisor.state import State
from protocol.to_worker import ChatPrompt, Generate, Sampling
from tests.gateway.harness import Gateway, running
from tests.support.daemon import DEADLINE_S, DaemonProcess
from tests.support.scale import patient

pytestmark = pytest.mark.anyio

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Gateway, None]:
    server = ServerConfig(max_body_bytes=100_000)
    home = tmp_path_factory.mktemp("g")
    async with running(home, ["--step-ms", "1"], server=server, worker="talkative") as made:
        yield made


@pytest.fixture
async def real(demo_daemon: DaemonProcess) -> AsyncGenerator[httpx2.AsyncClient, None]:
    """Served by the embedded model."""
    async with httpx2.AsyncClient(base_url=demo_daemon.url, timeout=DEADLINE_S) as client:
        yield client


def message(*script: list[str], **fields: Any) -> dict[str, Any]:
    said = json.dumps(script) if script else "hi"
    return {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": said}]} | fields


def events(text: str) -> list[Any]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]


def names(text: str) -> list[str]:
    return [line[7:] for line in text.splitlines() if line.startswith("event: ")]


# -- answers ---------------------------------------------------------------------------------------------------------


async def test_a_message_is_answered_in_one_piece(gateway: Gateway) -> None:
    answer = await gateway.client.post(PATH, json=message())

    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["id"].startswith("msg_")
    assert body["content"] == [{"type": "text", "text": "t0 t1 t2 t3 t4 "}]
    assert (body["type"], body["role"], body["model"], body["stop_reason"]) == (
        "message",
        "assistant",
        "m",
        "max_tokens",
    )
    assert (body["usage"]["input_tokens"], body["usage"]["output_tokens"]) == (3, 5)
    assert answer.headers["request-id"] == answer.headers["x-request-id"]


async def test_a_message_is_streamed_block_by_block(gateway: Gateway) -> None:
    script = (["reasoning", "hm"], ["text", "Calling"], ["tool", "f", '{"a": 1}'], ["finish", "tool_calls"])
    answer = await gateway.client.post(f"{PATH}?beta=true", json=message(*script, stream=True))

    assert answer.headers["content-type"].startswith("text/event-stream")
    said = events(answer.text)
    assert names(answer.text) == [event["type"] for event in said]
    starts = [event["content_block"]["type"] for event in said if event["type"] == "content_block_start"]
    assert starts == ["thinking", "text", "tool_use"]
    arguments = [event["delta"].get("partial_json", "") for event in said if event["type"] == "content_block_delta"]
    assert json.loads("".join(arguments)) == {"a": 1}
    assert said[-2]["delta"]["stop_reason"] == "tool_use"
    assert said[-1] == {"type": "message_stop"}


async def test_unknown_fields_betas_and_server_tools_are_ignored_and_named(gateway: Gateway) -> None:
    fields = {"context_management": {"edits": []}, "speed": "fast", "tools": [{"type": "web_search_1", "name": "w"}]}
    headers = [("anthropic-beta", "one-2026-01-01,two"), ("anthropic-beta", "three")]
    answer = await gateway.client.post(PATH, json=message(**fields), headers=headers)

    assert answer.status_code == 200, answer.text
    ignored = answer.headers["x-mlxd-ignored"].split(", ")
    assert ignored == ["speed", "tools.web_search_1", "beta.one-2026-01-01", "beta.two", "beta.three"]


async def test_the_root_answers_head_and_models_have_both_shapes(gateway: Gateway) -> None:
    assert (await gateway.client.head("/")).status_code == 200
    headers = {"anthropic-version": "2023-06-01"}
    listed = (await gateway.client.get("/v1/models?limit=1000", headers=headers)).json()
    one = (await gateway.client.get("/v1/models/m", headers=headers)).json()

    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("m", "m", False)
    assert listed["data"] == [one] or listed["data"][0]["id"] == one["id"]
    assert (one["type"], one["object"], one["display_name"]) == ("model", "model", "m")
    assert one["created_at"].endswith("+00:00")


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "kind"),
    [
        ("POST", PATH, b"{", 400, "invalid_request_error"),
        ("POST", PATH, json.dumps(message(max_tokens=-1)).encode(), 400, "invalid_request_error"),
        ("POST", PATH, json.dumps(message(model="gpt-9")).encode(), 404, "not_found_error"),
        ("POST", COUNT, b"[]", 400, "invalid_request_error"),
        ("POST", PATH, b"x" * 100_001, 413, "request_too_large"),
        ("GET", PATH, b"", 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches", b"{}", 400, "invalid_request_error"),
        ("GET", "/v1/messages/batches/msgbatch_x", b"", 404, "not_found_error"),
        ("GET", "/v1/models/gpt-9", b"", 404, "not_found_error"),
    ],
)
async def test_every_refusal_has_anthropics_shape(
    gateway: Gateway, method: str, path: str, content: bytes, status: int, kind: str
) -> None:
    headers = {"anthropic-version": "2023-06-01", "x-request-id": "req_7"}
    answer = await gateway.client.request(method, path, content=content, headers=headers)

    assert answer.status_code == status
    body = answer.json()
    assert (body["type"], body["error"]["type"], body["request_id"]) == ("error", kind, "req_7")
    assert body["error"]["message"]


async def test_an_image_is_a_clear_refusal(gateway: Gateway) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    answer = await gateway.client.post(PATH, json=message(messages=[{"role": "user", "content": [image]}]))

    assert answer.status_code == 400
    message_of = answer.json()["error"]["message"]
    assert message_of == "'messages.0.content.0': the model 'm' takes no images: it takes text."


async def test_a_full_queue_and_a_draining_server_have_anthropics_types(tmp_path: Path) -> None:
    model = ModelConfig(name="m", path="m", max_running=1)
    async with running(tmp_path, models=[model]) as gateway:
        gateway.app.services.admission.waiting_max = 0
        body = message(stream=True, max_tokens=1_000_000)
        async with gateway.client.stream("POST", PATH, json=body) as first:
            assert await anext(first.aiter_lines()) == "event: message_start"
            full = await gateway.client.post(PATH, json=message())
            gateway.app.drain()
            draining = await gateway.client.post(PATH, json=message())

        assert (full.status_code, full.json()["error"]["type"]) == (429, "rate_limit_error")
        assert (draining.status_code, draining.json()["error"]["type"]) == (503, "overloaded_error")
        assert "retry-after" in draining.headers


async def test_a_model_that_cannot_be_loaded_is_overloaded(tmp_path: Path) -> None:
    async with running(tmp_path, ["--exit-on-load", "66", "--goodbye-code", "20"]) as gateway:
        # A stream's status waits a second for its first event, a busy machine longer for a worker: this one has failed.
        for stream in (False, True):
            answer = await gateway.client.post(PATH, json=message(stream=stream))

            assert (answer.status_code, answer.json()["error"]["type"]) == (503, "overloaded_error")


async def test_an_error_after_the_first_byte_is_an_event(gateway: Gateway) -> None:
    script = (["text", "before"], ["wait"], ["finish", "abort"])
    answer = await gateway.client.post(PATH, json=message(*script, stream=True))

    said = events(answer.text)
    assert answer.status_code == 200
    assert said[-1]["type"] == "error"
    assert said[-1]["error"]["type"] == "overloaded_error"
    assert "before" in answer.text
    assert "message_stop" not in answer.text


# -- while nothing is generated yet ----------------------------------------------------------------------------------


async def test_a_cold_stream_starts_before_the_model_is_loaded(tmp_path: Path) -> None:
    async with (
        running(tmp_path, ["--load-s", str(1 + patient(1.5))]) as gateway,
        gateway.client.stream("POST", PATH, json=message(stream=True)) as answer,
    ):
        lines = answer.aiter_lines()
        assert await anext(lines) == "event: message_start"
        assert gateway.pool.worker("m").state in (State.STARTING, State.LOADING)
        rest = [line async for line in lines]

    assert json.loads(rest[-2][6:]) == {"type": "message_stop"}


async def test_pings_are_sent_during_a_load(tmp_path: Path) -> None:
    sent: list[bytes] = []

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(part: Any) -> None:
        sent.append(part.get("body", b""))

    async with running(tmp_path, ["--load-s", "0.4"]) as gateway:
        encoder = MessageStream("msg_1", "m")
        prompt = ChatPrompt([{"role": "user", "content": "hi"}])
        generate = Generate(gateway.link.next_rid(), prompt, Sampling(), max_tokens=2)
        record = RequestRecord("id", "POST", PATH)
        services = gateway.app.services
        with Generation(services, services.config.models["m"], [generate], record, encoder.bind) as generation:
            await respond_stream(generation, encoder, receive, send, StreamTiming(0.01, 0.02))

    said = names(b"".join(sent).decode())
    assert said[:3] == ["message_start", "ping", "ping"]
    assert said[-1] == "message_stop"


# -- a real model ----------------------------------------------------------------------------------------------------

TOOLS = [
    {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }
]


def asking(question: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"model": "demo", "max_tokens": 40, "temperature": 0, "messages": messages} | fields


def input_tokens(body: dict[str, Any]) -> int:
    return body["usage"]["input_tokens"] + body["usage"]["cache_read_input_tokens"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}], "tools": TOOLS},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"messages": [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Well"}]},
    ],
    ids=["plain", "tools", "thinking", "prefill"],
)
async def test_a_count_is_the_usage_of_the_same_request(real: httpx2.AsyncClient, fields: dict[str, Any]) -> None:
    body = asking("Hello.", **fields)
    counted = (await real.post(COUNT, json=body)).json()
    whole = (await real.post(PATH, json=body)).json()
    stream = events((await real.post(PATH, json=body | {"stream": True})).text)

    assert counted == {"input_tokens": input_tokens(whole)}
    assert input_tokens(stream[-2]) == input_tokens(stream[0]["message"]) == input_tokens(whole)


async def test_many_counts_at_once_are_answered(real: httpx2.AsyncClient) -> None:
    answers = await asyncio.gather(*(real.post(COUNT, json=asking("x" * n)) for n in range(1, 26)))

    counts = [answer.json()["input_tokens"] for answer in answers]
    assert counts == sorted(counts)
    assert counts[-1] > counts[0]


async def test_a_prompt_that_is_too_long_has_the_words_that_clients_parse(real: httpx2.AsyncClient) -> None:
    body = asking("one two three " * 60, model="small")
    counted = (await real.post(COUNT, json=body)).json()["input_tokens"]
    for stream in (False, True):
        answer = await real.post(PATH, json=body | {"stream": stream})

        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert answer.json()["error"]["message"] == f"prompt is too long: {counted} tokens > 256 maximum"


async def test_more_tokens_than_the_window_holds_are_clamped(real: httpx2.AsyncClient) -> None:
    answer = await real.post(PATH, json=asking("What is the capital of France?", model="small", max_tokens=32000))

    assert answer.status_code == 200, answer.text
    assert answer.json()["content"] == [{"type": "text", "text": "Paris."}]


async def test_a_prefilled_answer_is_continued(real: httpx2.AsyncClient) -> None:
    question = {"role": "user", "content": "Count from 3 to 9."}
    body = asking("", messages=[question, {"role": "assistant", "content": "3, 4, 5,"}])

    assert (await real.post(PATH, json=body)).json()["content"][0]["text"] == " 6, 7, 8, 9"


async def test_a_stop_sequence_is_named_and_not_said(real: httpx2.AsyncClient) -> None:
    body = (await real.post(PATH, json=asking("Count from 3 to 9.", stop_sequences=["x", ", 6"]))).json()

    assert body["content"] == [{"type": "text", "text": "3, 4, 5"}]
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", ", 6")


async def test_thinking_comes_when_it_is_asked_for(real: httpx2.AsyncClient) -> None:
    kinds: dict[str, list[str]] = {}
    for kind in ("enabled", "disabled", "adaptive", "absent"):
        fields = {} if kind == "absent" else {"thinking": {"type": kind}}
        body = (await real.post(PATH, json=asking("What is 12 plus 30?", max_tokens=200, **fields))).json()
        kinds[kind] = [block["type"] for block in body["content"]]

    assert kinds["enabled"] == ["thinking", "text"]
    # The demo model's template decides not to.
    assert kinds["disabled"] == kinds["adaptive"] == kinds["absent"] == ["text"]


async def test_a_stream_says_what_the_whole_message_says(real: httpx2.AsyncClient) -> None:
    body = asking("What is 12 plus 30?", max_tokens=200, thinking={"type": "enabled"})
    whole = (await real.post(PATH, json=body)).json()
    stream = events((await real.post(PATH, json=body | {"stream": True})).text)

    deltas = [event["delta"] for event in stream if event["type"] == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == whole["content"][0]["thinking"]
    assert "".join(delta.get("text", "") for delta in deltas) == whole["content"][1]["text"]


async def test_blocks_that_are_left_out_of_the_prompt_are_named(gateway: Gateway) -> None:
    use = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}
    said = {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, use, use]}
    messages = [{"role": "user", "content": "x"}, said, {"role": "user", "content": "y"}]
    answer = await gateway.client.post(PATH, json=message(messages=messages))

    assert answer.status_code == 200, answer.text
    assert answer.headers["x-mlxd-ignored"] == "messages.redacted_thinking, messages.server_tool_use"


@pytest.mark.parametrize("kind", ["image", "document", "tool_result", "search_result", "tool_reference"])
async def test_a_block_that_is_no_part_of_an_answer_is_refused_in_one(gateway: Gateway, kind: str) -> None:
    said = {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": kind}]}
    answer = await gateway.client.post(PATH, json=message(messages=[{"role": "user", "content": "x"}, said]))

    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("messages.1.content.1: ")


async def test_a_seed_is_used_and_named_as_in_the_other_dialects(gateway: Gateway, real: httpx2.AsyncClient) -> None:
    reply = await gateway.client.post(PATH, json=message(seed=7))
    assert reply.headers["x-mlxd-seed"] == "7"
    assert "x-mlxd-ignored" not in reply.headers
    assert int((await gateway.client.post(PATH, json=message(seed=-1))).headers["x-mlxd-seed"]) >= 0

    asked = message(model="demo", temperature=1.0, seed=7, max_tokens=24)
    first, again = [(await real.post(PATH, json=asked)).json()["content"] for _ in range(2)]
    assert first == again
