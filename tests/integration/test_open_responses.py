"""The HTTP tests of the Open Responses compliance suite (openresponses/openresponses, src/lib/compliance-tests.ts).

The same requests and the same checks, against the embedded model; shapes by the types made from its OpenAPI document,
each event of a stream included. Of the suite's other tests, those of WebSockets and of hosted searches do not concern
mlxd, and `response-output-phase-schema` sends no request.
"""

import json
from typing import Any, Final, get_args

import httpx
import openresponses_types.types as published
import pytest
from pydantic import BaseModel

from tests.support.daemon import DaemonProcess

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
PAGE: Final = "data:application/pdf;base64,JVBERi0xLjEKJSVFT0Y="


def message(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content, **fields}


def post(demo_daemon: DaemonProcess, path: str = "", **body: Any) -> httpx.Response:
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


@pytest.mark.parametrize(
    ("part", "code", "reason"),
    [
        ({"type": "input_image", "image_url": IMAGE}, "unsupported_modality", "takes no images"),
        ({"type": "input_file", "filename": "page.pdf", "file_data": PAGE}, "unsupported_parameter", "not supported"),
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
