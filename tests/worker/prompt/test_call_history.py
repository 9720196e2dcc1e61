"""Earlier calls, results and reasoning stand in the prompt as the model writes them and as the parser reads them."""

import re
from typing import Any

import pytest

from protocol.prompts import ChatPrompt
from tests.worker.prompt.test_templates import Tokenizer
from worker.prompt.templates import Renderer

Turns = list[dict[str, Any]]
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {"a": {}}}}}
    for name in ("look", "find")
]
USER: dict[str, Any] = {"role": "user", "content": "Q"}


def turn(*calls: tuple[str, str], **fields: Any) -> Turns:
    """A turn of calls, each with its id and name, and their results."""
    made = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": {"a": name.upper()}}}
        for call_id, name in calls
    ]
    results = [
        {"role": "tool", "tool_call_id": call_id, "name": name, "content": f"R-{name}"} for call_id, name in calls
    ]
    return [{"role": "assistant", "content": "", "tool_calls": made, **fields}, *results]


def render(template: str, messages: Turns, tools: Turns = TOOLS, **fields: Any) -> str:
    return Renderer(Tokenizer(template)).render(ChatPrompt(messages, tools, **fields))


LISTED = "{%- for t in tools or [] %}{{- t.function.name }};{%- endfor %}"
EACH = LISTED + "{%- for m in messages %}{{- '[' + m.role + ']' }}"
CALL = "{{- c.function.name + (c.function.arguments | tojson) }}"
TWO_TURNS = [USER, *turn(("call_x", "look"), ("call_y", "find")), USER, *turn(("call_z", "look")), USER]

# Mistral's rule for ids.
NINE = EACH + (
    "{%- if m.role == 'tool' and (m.tool_call_id or '') | length != 9 %}{{ raise_exception('nine characters') }}"
    "{%- endif %}{%- for c in m.tool_calls or [] %}{%- if (c.id or '') | length != 9 %}"
    "{{ raise_exception('nine characters') }}{%- endif %}<{{ c.id }}|"
    + CALL
    + ">{%- endfor %}{{- '#' + m.tool_call_id + '=' if m.tool_call_id }}{{- m.content }}{%- endfor %}"
)


def changed(messages: Turns, calls: list[str | None], results: list[str | None]) -> Turns:
    """The turns with these ids; None: without one."""
    ids = {"calls": iter(calls), "results": iter(results)}

    def with_id(fields: dict[str, Any], key: str, kind: str) -> dict[str, Any]:
        call_id = next(ids[kind])
        return {name: value for name, value in fields.items() if name != key} | (
            {} if call_id is None else {key: call_id}
        )

    return [
        with_id(message, "tool_call_id", "results")
        if message["role"] == "tool"
        else {**message, "tool_calls": [with_id(call, "id", "calls") for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


@pytest.mark.parametrize("template", [NINE], ids=["nine characters"])
@pytest.mark.parametrize(
    ("calls", "results"),
    [
        (["", "", ""], ["", "", ""]),
        ([None, None, None], [None, None, None]),
        (["a", "a", "a"], ["a", "a", "a"]),
        (["", "b", ""], ["", "b", ""]),
        (["a", "b", "c"], ["", "", ""]),
        (["call00000", "", "call00000"], ["call00000", "", "call00000"]),
    ],
)
def test_calls_without_ids_of_their_own_get_some_and_keep_their_results(
    template: str, calls: list[str | None], results: list[str | None]
) -> None:
    text = render(template, changed(TWO_TURNS, calls, results))
    shown = re.findall(r"<([^<|>]+)\|(?:look|find)|tool_call_begin\|>([^<]+)<", text)
    ids = [first or second for first, second in shown]
    given = dict(re.findall(r"(?:#|Return of )(\S+?)[=:](R-\w+)", text))

    assert len(set(ids[:2])) == 2
    assert [given[call_id] for call_id in ids[:2]] == ["R-look", "R-find"]
    assert ids[2] in given


def test_ids_of_calls_that_have_them_do_not_change() -> None:
    text = render(NINE, changed(TWO_TURNS, ["abcdefgh1", "", "abcdefgh3"], ["abcdefgh1", "", "abcdefgh3"]))
    assert re.findall(r"<(\w+)\|", text) == ["abcdefgh1", "call00000", "abcdefgh3"]
