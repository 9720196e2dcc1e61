"""Contents of a wrong type, in every position of every dialect, are shown to the model or refused: never dropped."""

import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

from tests.gateway.harness import Gateway, running
from tests.support.pool import short_home

pytestmark = pytest.mark.anyio

Body = dict[str, Any]
MARK = "7316549"
WRONG: list[Any] = [
    MARK,
    int(MARK),
    {"degrees": MARK},
    {"text": MARK},
    {"type": "text", "text": MARK},
    [MARK],
    [int(MARK)],
    [[MARK]],
    [{"degrees": MARK}],
    [{"text": MARK}],
    *(
        [{"type": kind} | fields]
        for kind in ("text", "input_text", "output_text", "refusal", "thinking", "search_result", "odd")
        for fields in (
            {"text": {"degrees": MARK}},
            {"text": [MARK]},
            {"content": MARK},
            {"content": {"degrees": MARK}},
            {"refusal": {"degrees": MARK}},
        )
    ),
    [{"type": "tool_result", "tool_use_id": "c", "text": MARK}],
    [{"type": "tool_result", "tool_use_id": "c", "content": {"degrees": MARK}}],
    [{"type": "image", "source": {"type": "text", "data": MARK}}],
    [{"type": "image_url", "image_url": {"link": MARK}}],
    [{"type": "document", "source": MARK}],
    [{"type": "document", "source": {"type": "text", "data": {"degrees": MARK}}}],
    [{"type": "document", "source": {"type": "text", "data": MARK}}],
    [{"type": "document", "source": {"type": "content", "content": {"degrees": MARK}}}],
    [{"type": "document", "source": {"type": "content", "content": [MARK]}}],
    [{"type": "document", "source": {"type": "content", "content": [{"type": "text", "content": MARK}]}}],
    [{"type": "input_file", "file_data": {"degrees": MARK}}],
    [{"type": "tool_reference", "name": MARK}],
    [{"type": "tool_use", "id": "t", "name": {"degrees": MARK}, "input": {}}],
    [{"type": "tool_use", "id": "t", "name": "f", "input": [MARK]}],
]
HI = {"role": "user", "content": "hi"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
USED = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]}
ITEM = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
CUSTOM = {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": ""}


def chat(*messages: Body) -> tuple[str, Body]:
    return "/v1/chat/completions", {"model": "m", "messages": [*messages, HI]}


def message(*messages: Body, **fields: Any) -> tuple[str, Body]:
    return "/v1/messages", {"model": "m", "max_tokens": 5, "messages": [*messages, HI]} | fields


def response(*items: Body, **fields: Any) -> tuple[str, Body]:
    return "/v1/responses", {"model": "m", "input": [*items, HI]} | fields


def ollama(*messages: Body) -> tuple[str, Body]:
    return "/api/chat", {"model": "m", "stream": False, "messages": [*messages, HI]}


def block(**fields: Any) -> tuple[str, Body]:
    return message({"role": "user", "content": [fields]})


def result(**fields: Any) -> tuple[str, Body]:
    return message(HI, USED, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"} | fields]})


def function(**fields: Any) -> Body:
    return {"function": {"name": "f"} | fields}


# Where a conversation has content, by dialect: the request with a value in that place.
POSITIONS: dict[str, Callable[[Any], tuple[str, Body]]] = {
    **{
        f"chat {role} content": lambda value, role=role: chat({"role": role, "content": value})
        for role in ("system", "developer", "user", "assistant")
    },
    "chat tool content": lambda value: chat(HI, CALLED, {"role": "tool", "tool_call_id": "c", "content": value}),
    "chat function content": lambda value: chat(HI, {"role": "function", "name": "f", "content": value}),
    "chat refusal": lambda value: chat({"role": "assistant", "content": None, "refusal": value}),
    "chat reasoning": lambda value: chat({"role": "assistant", "content": "a", "reasoning_content": value}),
    "chat arguments": lambda value: chat({"role": "assistant", "tool_calls": [CALL | function(arguments=value)]}),
    "chat function_call": lambda value: chat({"role": "assistant", "function_call": {"name": "f", "arguments": value}}),
    "chat text": lambda value: chat({"role": "user", "content": [{"type": "text", "text": value}]}),
    "messages system": lambda value: message(system=value),
    **{
        f"messages {role} content": lambda value, role=role: message({"role": role, "content": value})
        for role in ("user", "assistant", "system")
    },
    "messages text": lambda value: block(type="text", text=value),
    "messages thinking": lambda value: message(
        {"role": "assistant", "content": [{"type": "thinking", "thinking": value}, {"type": "text", "text": "a"}]}
    ),
    "messages input": lambda value: message(
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": value}]}
    ),
    "messages result": lambda value: result(content=value),
    "messages result that failed": lambda value: result(content=value, is_error=True),
    "messages text in a result": lambda value: result(content=[{"type": "text", "text": value}]),
    "messages search result": lambda value: block(type="search_result", title="t", source="s", content=value),
    "messages source of a search result": lambda value: block(
        type="search_result", title="t", source=value, content=[{"type": "text", "text": "a"}]
    ),
    "messages search result in a result": lambda value: result(
        content=[{"type": "search_result", "title": "t", "source": "s", "content": value}]
    ),
    "messages title": lambda value: block(type="document", title=value, source={"type": "text", "data": "a"}),
    "messages source": lambda value: block(type="document", source=value),
    "messages source in a result": lambda value: result(content=[{"type": "document", "source": value}]),
    "messages data": lambda value: block(type="document", source={"type": "text", "data": value}),
    "messages source content": lambda value: block(type="document", source={"type": "content", "content": value}),
    "responses input": lambda value: ("/v1/responses", {"model": "m", "input": value}),
    "responses instructions": lambda value: response(instructions=value),
    **{
        f"responses {role} content": lambda value, role=role: response({"role": role, "content": value})
        for role in ("system", "developer", "user", "assistant")
    },
    "responses output": lambda value: response(ITEM, {"type": "function_call_output", "call_id": "c", "output": value}),
    "responses custom output": lambda value: response(
        CUSTOM, {"type": "custom_tool_call_output", "call_id": "c", "output": value}
    ),
    "responses arguments": lambda value: response(ITEM | {"arguments": value}),
    "responses custom input": lambda value: response(CUSTOM | {"input": value}),
    "responses reasoning": lambda value: response({"type": "reasoning", "content": value}, ITEM),
    "responses summary": lambda value: response({"type": "reasoning", "summary": value}, ITEM),
    **{
        f"ollama {role} content": lambda value, role=role: ollama({"role": role, "content": value})
        for role in ("system", "user", "assistant", "tool")
    },
    "ollama thinking": lambda value: ollama({"role": "assistant", "content": "a", "thinking": value}),
    "ollama arguments": lambda value: ollama({"role": "assistant", "tool_calls": [function(arguments=value)]}),
    "ollama prompt": lambda value: ("/api/generate", {"model": "m", "stream": False, "prompt": value}),
    "ollama system": lambda value: ("/api/generate", {"model": "m", "stream": False, "prompt": "a", "system": value}),
}


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def gateway() -> AsyncGenerator[Gateway, None]:
    with short_home() as home:
        async with running(home, worker="seeing") as made:
            yield made


@pytest.mark.parametrize("position", POSITIONS)
async def test_a_content_of_a_wrong_type_is_shown_refused_or_named(gateway: Gateway, position: str) -> None:
    outcomes: set[str] = set()
    for value in WRONG:
        path, body = POSITIONS[position](value)
        reply = await gateway.client.post(path, json=body)

        shown = json.dumps({"input": value, "seen": reply.text})
        if reply.status_code == 400:
            assert "error" in reply.json(), shown
            outcomes.add("refused")
        else:
            # The worker's answer has the whole prompt. A block that is left out is named.
            assert reply.status_code == 200, shown
            is_named = f"messages.{_type(value)}" in reply.headers.get("x-mlxd-ignored", "").split(", ")
            assert MARK in _answer(reply.json()) or is_named, shown
            outcomes.add("shown")
    assert "refused" in outcomes


def _type(value: Any) -> str:
    return value[0].get("type", "") if isinstance(value, list) and isinstance(value[0], dict) else ""


def _answer(body: Any) -> str:
    """The answer's text; other fields of the body repeat the request."""
    match body:
        case {"choices": [{"message": {"content": text}}]} | {"message": {"content": text}} | {"response": text}:
            return text
        case {"content": [{"text": text}]} | {"output": [{"content": [{"text": text}]}]}:
            return text
        case _:
            raise AssertionError(body)
