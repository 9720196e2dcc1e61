"""What answers have in addition where a request asks for it, on the embedded model, read with the vendors' SDKs."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import openai
import pytest
from anthropic.types import Message
from openai.types.responses import Response

from tests.support.daemon import DaemonProcess

QUESTION = [{"role": "user", "content": "Name a colour of the rainbow, and nothing else, please."}]
ASKED: dict[str, Any] = {"model": "demo", "x_mlxd": {"timing": True}}
CHAT = {"messages": QUESTION, "max_tokens": 4}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "Name a colour of the rainbow", "max_tokens": 4},
    "/v1/messages": CHAT,
    "/v1/responses": {"input": QUESTION, "max_output_tokens": 4},
    "/api/chat": {"messages": QUESTION, "options": {"num_predict": 4}},
    "/api/generate": {"prompt": "Name a colour of the rainbow", "options": {"num_predict": 4}},
}


def extras(found: dict[str, Any]) -> dict[str, Any] | None:
    """The extras of an answer or of a stream's event. The Responses API has them in the response."""
    response = found.get("response")
    return (response if isinstance(response, dict) else found).get("x_mlxd")


def timing(found: dict[str, Any]) -> dict[str, Any]:
    return (extras(found) or {})["timing"]


def check(found: dict[str, Any]) -> None:
    assert found["completion_tokens"] in range(1, 6)
    assert found["prompt_tokens"] > 4
    assert found["total_ms"] >= found["ttft_ms"] > 0
    assert found["total_ms"] >= found["prefill_ms"] + found["decode_ms"]


@pytest.mark.parametrize("route", ROUTES)
def test_the_timing_is_in_a_whole_answer_if_it_is_asked_for(route: str, demo_daemon: DaemonProcess) -> None:
    answer = demo_daemon.client.post(route, json=ASKED | ROUTES[route] | {"stream": False})
    assert answer.status_code == 200, answer.text
    check(timing(answer.json()))


@pytest.mark.parametrize("route", ROUTES)
def test_the_timing_is_once_in_a_stream_if_it_is_asked_for(route: str, demo_daemon: DaemonProcess) -> None:
    answer = demo_daemon.client.post(route, json=ASKED | ROUTES[route] | {"stream": True})
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
    events = [json.loads(line) for line in lines if line.startswith("{")]
    (found,) = [event for event in events if extras(event)]
    check(timing(found))


@pytest.mark.parametrize("route", ROUTES)
def test_an_unknown_extra_is_refused(route: str, demo_daemon: DaemonProcess) -> None:
    answer = demo_daemon.client.post(route, json={"model": "demo", "x_mlxd": {"moon": True}} | ROUTES[route])
    assert answer.status_code == 400
    assert "moon" in answer.text


def test_an_answer_has_no_extras_by_itself(demo_daemon: DaemonProcess) -> None:
    answer = demo_daemon.client.post("/v1/messages", json={"model": "demo"} | CHAT)
    assert not {"x_mlxd", "diagnostics"} & answer.json().keys()


def test_a_background_response_has_its_own_timing(demo_daemon: DaemonProcess) -> None:
    body = ASKED | ROUTES["/v1/responses"] | {"background": True, "stream": True}
    text = demo_daemon.client.post("/v1/responses", json=body).text
    (last,) = [line for line in text.splitlines() if line.startswith("data: ") and '"x_mlxd"' in line]
    check(timing(json.loads(last.removeprefix("data: "))))


# -- comparisons -----------------------------------------------------------------------------------------------------

SYSTEM = "You are the careful assistant of a paint shop. You know every colour and answer in a word. "
ASK = "Which colour do you get when you mix yellow paint with blue paint?"
TOOL = {"name": "mix", "description": "Mixes paints.", "input_schema": {"type": "object", "properties": {}}}
Turn = Callable[..., Message]


@pytest.fixture
def client(demo_daemon: DaemonProcess) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=demo_daemon.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def turn(client: anthropic.Anthropic) -> Turn:
    def ask(system: str = SYSTEM, messages: Any = None, **fields: Any) -> Message:
        asked: Any = messages or [{"role": "user", "content": ASK}]
        return client.messages.create(model="demo", max_tokens=4, system=system, messages=asked, **fields)

    return ask


def going_on(first: Message, ask: str = ASK) -> list[dict[str, Any]]:
    said = "".join(block.text for block in first.content if block.type == "text")
    return [
        {"role": "user", "content": ask},
        {"role": "assistant", "content": said},
        {"role": "user", "content": "And with red paint?"},
    ]


def reason(message: Message) -> Any:
    assert message.diagnostics is not None
    assert message.diagnostics.cache_miss_reason is not None
    return message.diagnostics.cache_miss_reason


def test_anthropic_s_diagnostics_are_null_if_nothing_differs(turn: Turn) -> None:
    first = turn(diagnostics={"previous_message_id": None})
    assert first.diagnostics is None
    assert "diagnostics" in first.model_fields_set
    again = turn(messages=going_on(first), diagnostics={"previous_message_id": first.id})
    assert again.diagnostics is None


@pytest.mark.parametrize(
    ("changed", "kind", "words"),
    [
        ({"system": SYSTEM.replace("shop", "store")}, "system_changed", "The system prompt is not the same"),
        ({"tools": [TOOL]}, "tools_changed", "mix came"),
        ({"ask": ASK.replace("yellow", "green")}, "messages_changed", "message 1 (user)"),
    ],
)
def test_anthropic_s_diagnostics_name_what_has_changed(
    turn: Turn, changed: dict[str, Any], kind: str, words: str
) -> None:
    first = turn()
    messages = going_on(first, changed.pop("ask", ASK))
    found = reason(turn(messages=messages, diagnostics={"previous_message_id": first.id}, **changed))
    assert found.type == kind
    assert found.cache_missed_input_tokens > 0
    assert words in found.detail


def test_anthropic_s_diagnostics_of_an_unknown_message_say_so(turn: Turn) -> None:
    found = reason(turn(diagnostics={"previous_message_id": "msg_nobody"}))
    assert found.type == "previous_message_not_found"


def test_a_stream_begins_with_the_diagnostics(turn: Turn, client: anthropic.Anthropic) -> None:
    first = turn()
    with client.messages.stream(
        model="demo",
        max_tokens=4,
        system=SYSTEM.replace("shop", "store"),
        messages=going_on(first),  # pyright: ignore[reportArgumentType] - plain dicts
        extra_body={"diagnostics": {"previous_message_id": first.id}},
    ) as stream:
        diagnostics = stream.get_final_message().diagnostics
    assert diagnostics is not None
    # A stream that begins before its prompt has a place in the worker says that the comparison is not done.
    assert diagnostics.cache_miss_reason is None or diagnostics.cache_miss_reason.type == "system_changed"


def respond(demo_daemon: DaemonProcess, instructions: str, **options: Any) -> Response:
    body: Any = {"model": "demo", "instructions": instructions, "input": ASK, "max_output_tokens": 4}
    with openai.OpenAI(base_url=f"{demo_daemon.url}/v1", api_key="none", max_retries=0) as client:
        return client.responses.create(**body, **options)


def test_openai_s_comparison_names_what_has_changed(demo_daemon: DaemonProcess) -> None:
    first = respond(demo_daemon, SYSTEM)
    assert first.prompt_cache_diagnostics is None

    def compared(instructions: str, answer_id: str) -> Any:
        body = {"prompt_cache_options": {"comparison_response_id": answer_id}}
        return respond(demo_daemon, instructions, extra_body=body).prompt_cache_diagnostics

    assert compared(SYSTEM, first.id).type == "cache_hit"
    miss = compared(SYSTEM.replace("shop", "store"), first.id)
    assert (miss.type, miss.reason) == ("cache_miss", "input_changed")
    assert miss.cache_missed_tokens > 0
    assert miss.comparison_reusable_tokens > 0
    assert "“" in miss.detail
    assert compared(SYSTEM, "resp_nobody").type == "comparison_response_not_found"


def test_cache_options_that_change_nothing_are_named(demo_daemon: DaemonProcess) -> None:
    def status(options: dict[str, Any]) -> tuple[int, str]:
        body = {"model": "demo", "input": ASK, "max_output_tokens": 1, "prompt_cache_options": options}
        answer = demo_daemon.client.post("/v1/responses", json=body)
        return answer.status_code, answer.headers.get("x-mlxd-ignored", "")

    assert status({"mode": "implicit"}) == (200, "prompt_cache_options.mode")
    assert status({"comparison_response_id": 7})[0] == 400
