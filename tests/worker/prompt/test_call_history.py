"""Earlier calls, results and reasoning stand in the prompt as the model writes them and as the parser reads them."""

import json
import re
from typing import Any

import pytest

from protocol.checkpoint import ChatTemplates
from protocol.from_worker import DeltaKind
from protocol.to_worker import ChatPrompt
from tests.worker.output.parsers.replay import Case, calls_of, replay, text_of
from tests.worker.prompt.test_templates import Tokenizer
from worker.output.parsers.families import detect_family
from worker.prompt.family import calling_family
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


def read(family: str, text: str) -> list[tuple[str, dict[str, Any]]]:
    """The calls that the family's parser reads in a text that holds nothing else."""
    events, malformed = replay(Case("", family, text, "", "", [], TOOLS, start_in_reasoning=False))
    assert (malformed, text_of(events, DeltaKind.TEXT).strip()) == (0, "")
    return [(call.name, json.loads(call.arguments)) for call in calls_of(events)]


CALLED = [("look", {"a": "LOOK"}), ("find", {"a": "FIND"})]
LISTED = "{%- for t in tools or [] %}{{- t.function.name }};{%- endfor %}"
EACH = LISTED + "{%- for m in messages %}{{- '[' + m.role + ']' }}"
CALL = "{{- c.function.name + (c.function.arguments | tojson) }}"
# Kimi K2's notation with ids in the place of names.
SECTION = (
    "{%- if m.tool_calls %}<|tool_calls_section_begin|>{%- for c in m.tool_calls %}<|tool_call_begin|>{{ ID }}"
    "<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>{%- endfor %}"
    "<|tool_calls_section_end|>{%- endif %}"
)
RESULT_ID = "{%- if m.role == 'tool' %}## Return of {{ m.tool_call_id }}:{%- endif %}"
BY_ID = EACH + SECTION.replace("ID", "c.id") + RESULT_ID + "{{- m.content }}{%- endfor %}"
NUMBERED = "'functions.' + c.function.name + ':' ~ loop.index0"
BY_NUMBER = EACH + SECTION.replace("ID", NUMBERED) + RESULT_ID + "{{- m.content }}{%- endfor %}"
TWO_TURNS = [USER, *turn(("call_x", "look"), ("call_y", "find")), USER, *turn(("call_z", "look")), USER]


@pytest.mark.parametrize(
    ("template", "ids"),
    [
        (BY_ID, ["functions.look:0", "functions.find:1", "functions.look:2"]),
        (BY_NUMBER, ["functions.look:0", "functions.find:1", "functions.look:0"]),
    ],
    ids=["ids in place of names", "ids of results only"],
)
def test_ids_name_their_calls_where_a_template_shows_them_instead_and_are_those_of_the_results(
    template: str, ids: list[str]
) -> None:
    text = render(template, TWO_TURNS)

    assert re.findall(r"<\|tool_call_begin\|>(.*?)<", text) == ids
    assert re.findall(r"Return of (\S+):R", text) == ids
    section = text[text.index("<|tool_calls_section_begin|>") : text.index("[tool]")]
    assert read(calling_family(ChatTemplates.of(template)), section) == CALLED


def test_ids_stay_as_they_are_where_a_template_shows_names() -> None:
    calls = "{%- for c in m.tool_calls or [] %}<{{ c.id }}|" + CALL + ">{%- endfor %}"
    text = render(EACH + calls + RESULT_ID + "{{- m.content }}{%- endfor %}", TWO_TURNS)
    assert re.findall(r"call_.", text) == ["call_x", "call_y", "call_x", "call_y", "call_z", "call_z"]


def test_ids_that_a_template_keeps_in_a_list_of_its_own_are_those_of_the_results() -> None:
    queue = (
        "{%- set q = namespace(ids=[], n=0) %}" + EACH + "{%- if m.role == 'tool' %}## {{ q.ids.pop(0) }}:{%- endif %}"
        "{%- for c in m.tool_calls or [] %}{%- set id = c.function.name + ':' ~ q.n %}{%- set q.n = q.n + 1 %}"
        "{%- set _ = q.ids.append(id) %}<{{ id }}>{{ c.function.arguments | tojson }}{%- endfor %}"
        "{{- '(' + m.reasoning_content + ')' if m.reasoning_content }}{{- m.content }}{%- endfor %}"
    )  # fmt: skip
    messages = [USER, *turn(("call_x", "look"), ("call_y", "find"), reasoning_content="hm")]
    assert render(queue, messages).endswith(
        '[assistant]<look:0>{"a": "LOOK"}<find:1>{"a": "FIND"}(hm)[tool]## look:0:R-look[tool]## find:1:R-find'
    )


# Templates that show tools and results, but no calls; their words show the family.
DROPS_CALLS = {
    family: f"{{# {words} #}}" + EACH + "{{- m.content }}{%- endfor %}"
    for family, words in {
        "lfm2_pythonic": "<|tool_list_start|>",
        "granite3": "<|tool_call|> thought process",
        "glm47": "<arg_key>",
        "qwen3_coder": "<function= <parameter=",
        "deepseek_v31": "<｜tool▁calls▁begin｜>",
        "kimi_k2": "<|tool_calls_section_begin|>",
        "hermes": "",
    }.items()
}


@pytest.mark.parametrize("family", DROPS_CALLS)
def test_calls_that_a_template_drops_are_written_as_the_parser_of_the_model_reads_them(family: str) -> None:
    template = DROPS_CALLS[family]
    text = render(template, [USER, *turn(("call_x", "look"), ("call_y", "find")), USER])

    written = re.search(r"\[assistant\](.*)\[tool\]R-look\[tool\]R-find\[user\]", text, re.DOTALL)
    assert written, text
    assert calling_family(ChatTemplates.of(template)) == family
    assert read(family, written[1]) == CALLED


def test_text_and_reasoning_beside_a_call_that_is_written_into_the_content_are_kept() -> None:
    template = DROPS_CALLS["lfm2_pythonic"].replace("m.content", "(m.reasoning_content or '') + m.content")
    text = render(template, [USER, *turn(("call_x", "look"), content="I look.", reasoning_content="Hm. ")])
    assert '[assistant]Hm. I look.\n<|tool_call_start|>[look(a="LOOK")]<|tool_call_end|>[tool]' in text


# DeepSeek's way: a template that takes no tools, but has the notation of calls and a place for results.
NO_TOOLS = (
    "{%- for m in messages %}{%- if m.role == 'tool' %}{{- '<out>' + m.content + '</out>' }}"
    "{%- elif m.role in ['system', 'user', 'assistant'] %}{{- '[' + m.role + ']' + m.content }}{%- endif %}"
    "{%- endfor %}"
)


def test_a_template_without_tools_gets_them_in_the_notation_that_it_shows() -> None:
    template = "{# <｜tool▁calls▁begin｜> #}" + NO_TOOLS
    text = render(template, [USER, *turn(("call_x", "look"), ("call_y", "find")), USER])
    system, user, calls, results = re.split(r"\[user\]|\[assistant\]|<out>", text, maxsplit=3)

    assert '"name": "look"' in system
    example = system[system.index("<｜tool▁calls▁begin｜>") :]
    events, malformed = replay(Case("", "deepseek_v31", example, "", "", []))
    assert ([call.name for call in calls_of(events)], malformed) == (["function_name", "other_function_name"], 0)
    assert user == "Q"
    assert read("deepseek_v31", calls) == CALLED
    assert results == "R-look</out><out>R-find</out>[user]Q"


def test_a_template_without_tools_or_a_notation_gets_both_in_that_of_hermes() -> None:
    text = render(NO_TOOLS, [USER, *turn(("call_x", "look")), USER])
    assert '<tool_call>\n{"name": <function-name>' in text
    assert text.endswith("[user]<tool_response>\nR-look\n</tool_response>\n\nQ")


def test_the_notation_of_calls_is_that_of_the_vocabulary_where_the_template_shows_none() -> None:
    plain, thinking = ChatTemplates.of("{{ m }}"), ChatTemplates.of("{{ '</think>' }}")
    deepseek = {"<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>", "<think>", "</think>"}
    assert calling_family(plain, deepseek) == "deepseek_v3"
    assert detect_family(thinking, deepseek, "") == "think"
    assert calling_family(thinking, deepseek) == "deepseek_v3"
    assert calling_family(thinking, {"<tool_call>", "</tool_call>"}) == "hermes"
    assert calling_family(thinking) == calling_family(plain) == "hermes"
    # The parser of these would take the model's reasoning for text.
    assert calling_family(thinking, {"[TOOL_CALLS]", "[ARGS]"}) == "hermes"


CALLS = "{%- for c in m.tool_calls or [] %}" + CALL + "{%- endfor %}"
SAYS = EACH + "THOUGHT{{- m.content }}" + CALLS + "{%- endfor %}"
IN_PARTS = (
    EACH + "{%- if m.content is string %}{{- m.content }}{%- else %}{%- for p in m.content %}"
    "{{- '(' + p.thinking + ')' if p.type == 'thinking' else p.text }}{%- endfor %}{%- endif %}"
    + CALLS + "{%- endfor %}"
)  # fmt: skip
IN_BLOCKS = (
    "{# thoughts #}" + EACH + "{%- if m.content is string %}{{- m.content }}{%- else %}{%- for b in m.content.blocks %}"
    "{{- '(' + b.text + ')' if b.type == 'thoughts' else b.text }}{%- endfor %}{%- endif %}"
    + CALLS + "{%- endfor %}"
)  # fmt: skip
READS = {
    **{
        name: SAYS.replace("THOUGHT", f"{{{{- '(' + m.{name} + ')' if m.{name} }}}}")
        for name in ("reasoning_content", "reasoning", "thinking", "thought", "thoughts")
    },
    "parts": IN_PARTS,
    "blocks": IN_BLOCKS,
}


@pytest.mark.parametrize("template", READS.values(), ids=READS)
def test_reasoning_is_sent_where_a_template_reads_it(template: str) -> None:
    messages = [
        USER,
        *turn(("x", "look"), reasoning_content="one"),
        *turn(("y", "find"), content="I find.", reasoning_content="two"),
        {"role": "assistant", "content": "Found."},
        USER,
    ]
    assert render(template, messages).endswith(
        '[user]Q[assistant](one)look{"a": "LOOK"}[tool]R-look[assistant](two)I find.find{"a": "FIND"}[tool]R-find'
        "[assistant]Found.[user]Q"
    )
    opened = [USER, {"role": "assistant", "content": "Fou", "reasoning_content": "three"}]
    assert render(template, opened, continue_final=True).endswith("[user]Q[assistant](three)Fou")


def test_reasoning_that_a_variable_of_the_request_shows_is_sent_under_the_name_that_the_template_reads() -> None:
    template = SAYS.replace("THOUGHT", "{{- '(' + m.thought + ')' if add_thoughts and m.thought }}")
    messages = [USER, *turn(("x", "look"), reasoning_content="one")]
    assert "(one)" not in render(template, messages)
    assert "[assistant](one)look" in render(template, messages, template_kwargs={"add_thoughts": True})


@pytest.mark.parametrize("content", ["m.content", "(m.content | string)", "(m.content | tojson)"])
def test_reasoning_that_a_template_does_not_keep_changes_nothing_in_the_contents(content: str) -> None:
    template = SAYS.replace("THOUGHT", "").replace("m.content", content)
    with_reasoning = [USER, *turn(("x", "look"), content="I look.", reasoning_content="one")]
    assert render(template, with_reasoning) == render(template, [USER, *turn(("x", "look"), content="I look.")])


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


@pytest.mark.parametrize("template", [NINE, BY_ID], ids=["nine characters", "ids in place of names"])
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
