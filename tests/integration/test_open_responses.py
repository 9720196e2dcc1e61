"""The tests of the Open Responses compliance suite (openresponses/openresponses, src/lib/compliance-tests.ts).

The same requests and the same checks, against the embedded model; shapes by the types made from its OpenAPI document,
each event of a stream included. The suite's tests of hosted searches do not concern mlxd, and
`response-output-phase-schema` sends no request.
"""

import base64
import json
from collections.abc import Iterator
from typing import Any, Final, get_args

import httpx2
import openresponses_types.types as published
import pytest
from pydantic import BaseModel
from websockets.sync.client import ClientConnection, connect

from tests.support.daemon import DaemonProcess
from tests.support.pdfs import PdfSheet, pdf
from tests.support.scale import patient

GET_WEATHER: Final[dict[str, Any]] = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather for a location",
    "parameters": {
        "type": "object",
        "properties": {"location": {"type": "string", "description": "The city and state, e.g. San Francisco, CA"}},
        "required": ["location"],
    },
}
# The suite sends a red heart and a page with a title; what they show does not matter here.
IMAGE: Final = "data:image/png;base64,iVBORw0KGgo="
CAPITAL: Final = "What is the capital of France?"
PAGE: Final = "data:application/pdf;base64,JVBERi0xLjEKJSVFT0Y="


def message(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content, **fields}


def post(demo_daemon: DaemonProcess, path: str = "", **body: Any) -> httpx2.Response:
    headers = {"Authorization": "Bearer any"}
    return demo_daemon.client.post(f"/v1/responses{path}", json={"model": "demo", **body}, headers=headers)


def answer(demo_daemon: DaemonProcess, **body: Any) -> dict[str, Any]:
    """A whole response, which is as published and has output."""
    reply = post(demo_daemon, **body, stream=False)
    assert reply.status_code == 200, reply.text
    published.ResponseResource.model_validate_json(reply.content)
    assert reply.json()["output"]
    return reply.json()


def stream(demo_daemon: DaemonProcess, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, each as published, and numbered; the last one has a whole response."""
    reply = post(demo_daemon, **body, stream=True)
    assert reply.status_code == 200, reply.text
    blocks = [block.split("\n") for block in reply.text.split("\n\n") if block]
    events = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [f"event: {event['type']}" for event in events] == [name for name, _ in blocks]
    for event in events:
        EVENTS[event["type"]].model_validate(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    published.ResponseResource.model_validate(events[-1]["response"])
    return events


def _event_types() -> dict[str, type[BaseModel]]:
    """The published events by their `type`."""
    models = [found for name, found in vars(published).items() if name.endswith("StreamingEvent")]
    return {tag.value: model for model in models for tag in _tags(model)}


def _tags(model: type[BaseModel]) -> list[Any]:
    annotation: Any = model.model_fields["type"].annotation
    return list(get_args(annotation) or annotation)


EVENTS: Final = _event_types()

TEXTS: Final[dict[str, list[dict[str, Any]]]] = {
    "basic-response": [message("user", "Say hello in exactly 3 words.")],
    "system-prompt": [
        message("system", "You are a pirate. Always respond in pirate speak."),
        message("user", "Say hello."),
    ],
    "multi-turn": [
        message("user", "My name is Alice."),
        message("assistant", "Hello Alice! Nice to meet you. How can I help you today?"),
        message("user", "What is my name?"),
    ],
    "assistant-phase": [
        message("assistant", "I should answer with the saved number.", phase="commentary"),
        message("assistant", "The number is four.", phase="final_answer"),
        message("user", "Repeat only the number."),
    ],
}


@pytest.mark.parametrize("test", TEXTS)
def test_a_text(demo_daemon: DaemonProcess, test: str) -> None:
    assert (answer(demo_daemon, input=TEXTS[test]))["status"] == "completed"


def test_streaming_response(demo_daemon: DaemonProcess) -> None:
    events = stream(demo_daemon, input=[message("user", "Count from 1 to 5.")])

    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"]["status"] == "completed"


def test_tool_calling(demo_daemon: DaemonProcess) -> None:
    asked = [message("user", "What's the weather like in San Francisco?")]
    whole = answer(demo_daemon, input=asked, tools=[GET_WEATHER])

    assert "function_call" in {item["type"] for item in whole["output"]}


def test_tool_calling_streaming(demo_daemon: DaemonProcess) -> None:
    asked = [message("user", "What's the weather like in San Francisco?")]
    events = stream(demo_daemon, input=asked, tools=[GET_WEATHER])

    types = [event["type"] for event in events]
    assert "response.function_call_arguments.delta" in types
    assert "response.function_call_arguments.done" in types
    for kind in ("response.output_item.added", "response.output_item.done"):
        items = [event["item"]["type"] for event in events if event["type"] == kind]
        assert "function_call" in items


def test_function_call_roundtrip(demo_daemon: DaemonProcess) -> None:
    first = answer(
        demo_daemon,
        input="Use the weather tool to get the temperature in San Francisco.",
        tools=[GET_WEATHER],
        tool_choice={"type": "function", "name": "get_weather"},
    )
    call = next(item for item in first["output"] if item["type"] == "function_call")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "64 degrees and clear"}
    second = answer(demo_daemon, previous_response_id=first["id"], input=[result])

    assert second["status"] == "completed"


def test_previous_response_id(demo_daemon: DaemonProcess) -> None:
    first = answer(demo_daemon, input="Remember this code word: papaya. Reply with only OK.")
    asked = "What code word did I ask you to remember?"
    second = answer(demo_daemon, previous_response_id=first["id"], input=asked)

    assert (second["status"], second["previous_response_id"]) == ("completed", first["id"])


def test_compact_response(demo_daemon: DaemonProcess) -> None:
    said = [
        message("user", "We agreed to launch on Tuesday and notify support first."),
        message("assistant", "Understood. The launch is Tuesday, with support notified beforehand."),
    ]
    reply = post(demo_daemon, "/compact", prompt_cache_key="openresponses-compact-test", input=said)

    assert reply.status_code == 200, reply.text
    published.CompactResource.model_validate_json(reply.content)
    assert reply.json()["object"] == "response.compaction"
    assert "compaction" in {item["type"] for item in reply.json()["output"]}


def test_compact_missing_model(demo_daemon: DaemonProcess) -> None:
    reply = demo_daemon.client.post("/v1/responses/compact", json={"input": [message("user", "Compact this.")]})

    assert reply.status_code in (400, 422)


def test_file_input(demo_daemon: DaemonProcess) -> None:
    data = base64.b64encode(pdf(PdfSheet("Hello"))).decode()
    file = {"type": "input_file", "filename": "page.pdf", "file_data": f"data:application/pdf;base64,{data}"}
    answer(demo_daemon, input=[message("user", [{"type": "input_text", "text": "What is this?"}, file])])


@pytest.mark.parametrize(
    ("part", "code", "reason"),
    [
        ({"type": "input_image", "image_url": IMAGE}, "unsupported_modality", "takes no images"),
        (
            {"type": "input_file", "filename": "page.pdf", "file_data": PAGE},
            "invalid_document",
            "no PDF that can be read",
        ),
    ],
    ids=["image-input", "file-input"],
)
def test_what_a_text_model_cannot_see_is_refused_in_so_many_words(
    demo_daemon: DaemonProcess, part: dict[str, Any], code: str, reason: str
) -> None:
    asked = message("user", [{"type": "input_text", "text": "What is this?"}, part])
    reply = post(demo_daemon, input=[asked])

    assert reply.status_code == 400
    error = reply.json()["error"]
    assert reason in error["message"]
    assert (error["param"], error["code"]) == ("input[0].content[1]", code)


# -- WebSockets ------------------------------------------------------------------------------------------------------


@pytest.fixture
def socket(demo_daemon: DaemonProcess) -> Iterator[ClientConnection]:
    with _open(demo_daemon) as connection:
        yield connection


def _open(demo_daemon: DaemonProcess) -> ClientConnection:
    url = demo_daemon.url.replace("http", "ws", 1) + "/v1/responses"
    return connect(url, additional_headers={"Authorization": "Bearer any"}, max_size=None, open_timeout=patient(10))


def turn(socket: ClientConnection, given: Any, **fields: Any) -> dict[str, Any]:
    """The last event of a turn, whose events are as published."""
    socket.send(json.dumps({"type": "response.create", "model": "demo", "input": given, "store": False, **fields}))
    while True:
        event = json.loads(socket.recv(timeout=patient(60)))
        if event["type"] == "error":
            assert isinstance(event["status"], int)
            return event
        EVENTS[event["type"]].model_validate(event)
        if event["type"] in ("response.completed", "response.incomplete", "response.failed"):
            published.ResponseResource.model_validate(event["response"])
            return event


def test_turns_follow_each_other_on_a_websocket(socket: ClientConnection) -> None:
    first = turn(socket, "Reply with exactly: first")["response"]
    second = turn(socket, "Reply with exactly: second")["response"]
    third = turn(socket, "What did I say?", previous_response_id=second["id"], max_output_tokens=2)["response"]

    assert first["status"] == second["status"] == "completed"
    assert third["usage"]["input_tokens"] > second["usage"]["input_tokens"] + second["usage"]["output_tokens"]


def test_a_websocket_answers_as_a_post_does(demo_daemon: DaemonProcess, socket: ClientConnection) -> None:
    posted = answer(demo_daemon, input=CAPITAL)
    streamed = turn(socket, CAPITAL)["response"]

    assert streamed["output"][0]["content"] == posted["output"][0]["content"]
    assert streamed["usage"]["output_tokens"] == posted["usage"]["output_tokens"]


def test_what_is_not_stored_is_gone_with_its_websocket(demo_daemon: DaemonProcess, socket: ClientConnection) -> None:
    with _open(demo_daemon) as before:
        first = turn(before, "Remember the code word: copper. Reply with OK.")["response"]
    missed = turn(socket, "Go on.", previous_response_id=first["id"])
    recovered = turn(socket, "Start again.")

    assert (missed["status"], missed["error"]["code"]) == (400, "previous_response_not_found")
    assert recovered["response"]["status"] == "completed"


def test_an_output_without_its_call_fails_and_evicts_what_it_continued(socket: ClientConnection) -> None:
    first = turn(socket, "Remember the code word: ember. Reply with OK.")["response"]
    orphan = {"type": "function_call_output", "call_id": "call_openresponses_missing", "output": "none"}
    failed = turn(socket, [orphan], previous_response_id=first["id"])
    gone = turn(socket, "Go on.", previous_response_id=first["id"])

    assert (failed["status"], failed["error"]["param"]) == (400, "input[0].call_id")
    assert gone["error"]["code"] == "previous_response_not_found"


def test_a_compacted_conversation_begins_a_new_chain(demo_daemon: DaemonProcess, socket: ClientConnection) -> None:
    said = [message("user", "Remember: slate."), message("assistant", "OK."), message("user", "Compress this.")]
    compacted = post(demo_daemon, "/compact", input=said).json()["output"]

    assert turn(socket, [*compacted, message("user", "Go on.")])["response"]["status"] == "completed"


def test_a_prewarmed_prompt_is_in_the_cache(socket: ClientConnection) -> None:
    long = "This line is unique to the test of prewarming on a WebSocket. " * 5
    warm = turn(socket, [message("user", long)], generate=False)["response"]
    after = turn(socket, "Hi.", previous_response_id=warm["id"], max_output_tokens=2)["response"]
    fields = {"instructions": f"Other instructions. {long}"}
    no_turn = turn(socket, [], generate=False, **fields)["response"]
    later = turn(socket, "Hi.", previous_response_id=no_turn["id"], max_output_tokens=2, **fields)["response"]

    assert warm["output"] == no_turn["output"] == []
    # All but the end of the warmed prompt is read from the cache.
    assert after["usage"]["input_tokens_details"]["cached_tokens"] > warm["usage"]["input_tokens"] // 2
    assert later["usage"]["input_tokens_details"]["cached_tokens"] > no_turn["usage"]["input_tokens"] // 2
