"""Arguments of a call are all that the model wrote for it, or the call is reported as incomplete."""

import json
from typing import Any

import pytest

from tests.worker.output.parsers.replay import Case, calls_of, check_shape, is_json, replay
from worker.output.parsers.parser import make_parser

TOOLS: list[dict[str, Any]] = [
    {
        "name": "f",
        "parameters": {"properties": {"n": {"type": "integer"}, "s": {"type": "string"}, "t": {"type": "string"}}},
    },
    {"name": "g"},
]


def arguments_of(family: str, raw: str) -> list[str]:
    """The arguments of each call, the same in every split of the output."""
    case = Case("", family, raw, "", "", [], TOOLS, False)
    whole = replay(case)
    check_shape(*whole)
    assert all(replay(case, [at]) == whole for at in range(1, len(raw)))
    assert replay(case, range(1, len(raw))) == whole
    return [call.arguments for call in calls_of(whole[0])]


Q = '<|"|>'
BOTH = {"s": "look", "n": 90}


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        (f"f{{s:{Q}look{Q}n:90}}", BOTH),
        (f"f{{s:{Q}look{Q} n:90}}", BOTH),
        (f"f{{s:{Q}look{Q};n:90}}", BOTH),
        (f"f{{s={Q}look{Q},n=90}}", BOTH),
        (f"f{{s:{Q}look{Q},n:90,}}", BOTH),
        (f"f(s={Q}look{Q}, n=90)", BOTH),
        (f"f(s:{Q}look{Q} n:90,)", BOTH),
        (f"f({{s:{Q}look{Q},n:90}})", BOTH),
        (f"f\n(s={Q}look{Q}, n=90)", BOTH),
        ("f{s:look\nn:90}", BOTH),
        ("f{n:90 s:look}", BOTH),
        ("f{n:90; s:look}", BOTH),
        ("f{n: 90\n  s: look\n}", BOTH),
        ("f{s:'look'n:90}", BOTH),
        ("f()", {}),
        ("f{s:at 10:30 see: it\nPS: so}", {"s": "at 10:30 see: it\nPS: so"}),
        ("f{s:a, and more,n:1}", {"s": "a, and more", "n": 1}),
        ("f{n:1, s:Hello, note: this}", {"n": 1, "s": "Hello, note: this"}),
        ("f{s:x = g(1, end=2), t: a, b,}", {"s": "x = g(1, end=2)", "t": "a, b"}),
        (f"f{{s:a, b, {Q}t{Q}:{Q}c{Q}}}", {"s": "a, b", "t": "c"}),
        ("f{n:1, note: x}", {"n": 1, "note": "x"}),
        ("g{a:b, c:d}", {"a": "b", "c": "d"}),
        ("f{s:http://a.example/b?c=d}", {"s": "http://a.example/b?c=d"}),
        (f"f{{s:{Q}a\nn:1,t=2){Q}}}", {"s": "a\nn:1,t=2)"}),
        (f"g{{o:{{a:1 b:{Q}x{Q}c:[1,2]\nd:true}}}}", {"o": {"a": 1, "b": "x", "c": [1, 2], "d": True}}),
        ("g{a:1\nb:word more\nc:2}", {"a": 1, "b": "word more", "c": 2}),
    ],
)
def test_a_call_of_gemma_without_commas_or_braces_has_all_arguments(written: str, arguments: dict[str, Any]) -> None:
    for raw in (f"<|tool_call>call:{written}<tool_call|>", f"call:{written}"):
        assert [json.loads(found) for found in arguments_of("gemma4", raw)] == [arguments]
    raw = f"<start_function_call>call:{written.replace(Q, '<escape>')}<end_function_call>"
    assert [json.loads(found) for found in arguments_of("function_gemma", raw)] == [arguments]


def test_words_in_parentheses_are_no_call_of_gemma() -> None:
    assert arguments_of("gemma4", "<|tool_call>call:f(look)<tool_call|>") == []
    assert arguments_of("gemma4", "call:f(x) calls it") == []


def kimi(arguments: str) -> str:
    call = f"<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
    return f"<|tool_calls_section_begin|>{call}<|tool_calls_section_end|>"


def harmony(arguments: str) -> str:
    return f"<|channel|>commentary to=functions.f<|message|>{arguments}<|call|>"


LOST = [
    ("gemma4", "<|tool_call>call:f{n:1}, s:a}<tool_call|>"),
    ("gemma4", "<|tool_call>call:f{n:1} s:a<tool_call|>"),
    ("gemma4", "<|tool_call>call:f(n=1), s=a)<tool_call|>"),
    ("gemma4", "<|tool_call>call:f(s=g(x), n=1)<tool_call|>"),
    ("gemma4", "<|tool_call>call:f{s:a{b}, n:1}<tool_call|>"),
    ("gemma4", f"<|tool_call>call:f{{s:{Q}a{Q} and more,n:1}}<tool_call|>"),
    ("gemma4", "<|tool_call>call:f{s:a,note:b,n:1}<tool_call|>"),
    ("gemma4", "<|tool_call>call:f{n:1,s:'say 'q: x' ok'}<tool_call|>"),
    ("llama3_json", '<|python_tag|>f.call(s="g(")")'),
    ("llama3_json", '<|python_tag|>f.call(s="a") + x'),
    ("lfm2_pythonic", "<|tool_call_start|>[f(n=1), s='a')]<|tool_call_end|>"),
    ("lfm2_pythonic", "<|tool_call_start|>[f(n=1, 'a')]<|tool_call_end|>"),
    ("lfm2_pythonic", "<|tool_call_start|>[f(n=1 s='a')]<|tool_call_end|>"),
    ("lfm2_pythonic", "<|tool_call_start|>[f(n=1, **{'s': 'a'})]<|tool_call_end|>"),
    ("pythonic", "[f(n=1), s='a']"),
    ("kimi_k2", kimi('{"n": 1}, "s": "a"}')),
    ("kimi_k2", kimi('{"n": 1}{"s": "a"}')),
    ("kimi_k2", kimi('{"n": 1} s=a')),
    ("harmony", harmony('{"n": 1}, "s": "a"}')),
    ("harmony", harmony('{"n": 1} {"s": "a"}')),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"n": 1}, "s": "a"}'),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"n": 1} "s": "a"}'),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"n": 1}{"s": "a"}'),
    ("gemma4", "call:f{n:1}{s:a}"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"n": 1}}, "s": "a"}</tool_call>'),
    ("llama3_json", '{"name": "f", "parameters": {"n": 1}},\n "s": "a"}'),
    ("mistral_v3", '[TOOL_CALLS][{"name": "f", "arguments": {"n": 1}}, "s": "a"}]'),
    ("functionary_v31", '<function=f>{"n": 1}, "s": "a"}</function>'),
    ("functionary_v32", '>>>f\n{"n": 1}, "s": "a"}'),
]
TWICE = [
    ("gemma4", "<|tool_call>call:f{s:a,s:b}<tool_call|>"),
    ("gemma4", "<|tool_call>call:g{o:{s:a,s:b}}<tool_call|>"),
    ("lfm2_pythonic", "<|tool_call_start|>[f(n=1, n=2)]<|tool_call_end|>"),
    ("lfm2_pythonic", "<|tool_call_start|>[f(n={'a': 1, 'a': 2})]<|tool_call_end|>"),
    ("llama3_json", '<|python_tag|>f.call(n=1, n=2)'),
    ("llama3_json", '{"name": "f", "parameters": {"n": 1, "n": 2}}'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"n": 1, "n": 1}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"n": 1, "\\u006e": 2}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"o": [{"a": 1, "a": 2}]}}</tool_call>'),
    ("kimi_k2", kimi('{"n": 1, "n": 2}')),
    ("harmony", harmony('{"n": 1, "n": 2}')),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"n": 1, "n": 2}'),
]  # fmt: skip


@pytest.mark.parametrize(("family", "raw"), [*LOST, *TWICE])
def test_a_call_with_an_argument_outside_of_it_or_twice_is_not_complete(family: str, raw: str) -> None:
    assert [is_json(arguments) for arguments in arguments_of(family, raw)] == [False]
    parser = make_parser(family, tools=TOOLS, start_in_reasoning=False)
    parser.feed(raw)
    parser.finish()
    assert (parser.is_broken, parser.malformed) == (True, 1)


@pytest.mark.parametrize(
    ("family", "raw"),
    [
        ("gemma4", "<|tool_call>call:f{n:1}}<tool_call|>"),
        ("gemma4", "<|tool_call>call:f({n:1}<tool_call|>"),
        ("lfm2_pythonic", "<|tool_call_start|>[f(n=1),]<|tool_call_end|>"),
        ("kimi_k2", kimi('{"n": 1}}')),
        ("kimi_k2", kimi('{"n": 1}\n```\n')),
        ("harmony", harmony('{"n": 1}}')),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"n": 1} Done, so.'),
    ],
)
def test_a_bracket_too_many_or_text_that_may_follow_harms_no_call(family: str, raw: str) -> None:
    assert arguments_of(family, raw) == ['{"n": 1}']


@pytest.mark.parametrize(
    "raw",
    [
        "<|tool_call>call:f{n:1}call:g{}<tool_call|>",
        "<|tool_call>call:f{n:1}, call:g{}<tool_call|>",
        "<|tool_call>call:f(n=1)\ncall:g()<tool_call|>",
        "<|tool_call>call:f(n=1)<tool_call|><|tool_call>call:g()<tool_call|>",
    ],
)
def test_two_calls_of_gemma_stay_two(raw: str) -> None:
    assert arguments_of("gemma4", raw) == ['{"n": 1}', "{}"]


@pytest.mark.parametrize(
    ("family", "call", "value"),
    [
        # A backslash that no escape of JSON follows is text.
        (
            "hermes",
            '<tool_call>\n{"name": "f", "arguments": {"s": "#define A(x) \\\n  x"}}\n</tool_call>',
            "#define A(x) \\\n  x",
        ),
        ("llama3_json", '{"name": "f", "parameters": {"s": "C:\\apps\\x86\\v0\\d"}}', "C:\\apps\\x86\\v0\\d"),
        (
            "mistral",
            '[TOOL_CALLS] [{"name": "f", "arguments": {"s": "$\\alpha + \\vec{x}$ \\u00e9"}}]',
            "$\\alpha + \\vec{x}$ é",
        ),
        ("pythonic", '[f(s="a\\x41\\a")]', "aA\a"),
    ],
)
def test_escapes_are_those_of_the_notation(family: str, call: str, value: str) -> None:
    assert [json.loads(each)["s"] for each in arguments_of(family, call)] == [value]


@pytest.mark.parametrize(
    ("label", "written", "value"),
    [
        ("true", "42", "42"),
        ("true", "null", "null"),
        ("false", "42", 42),
        ("false", "+4930123456", "+4930123456"),
    ],
)
def test_a_value_that_is_marked_as_text_is_text(label: str, written: str, value: object) -> None:
    declared = {
        "name": "run",
        "parameters": {"properties": {"v": {"anyOf": [{"type": "string"}, {"type": "integer"}]}}},
    }
    raw = (
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="run">\n'
        f'<｜DSML｜parameter name="v" string="{label}">{written}</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
    )
    events, malformed = replay(Case("", "deepseek_v4", raw, "", "", [], [declared], False))

    assert [json.loads(call.arguments) for call in calls_of(events)] == [{"v": value}]
    assert not malformed
