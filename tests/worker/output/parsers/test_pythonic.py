"""Python calls: text that Python can read means what Python says, and quotes that are not escaped cost little."""

import ast
import json
import random
import time
from collections.abc import Sequence
from typing import Any, Final

import pytest

from protocol.from_worker import DeltaKind
from tests.worker.output.parsers.replay import Case, calls_of, is_json, random_cuts, replay, text_of
from worker.output.parsers.parser import make_parser

ALPHABET = "ab1=,:;()[]{}<>|\"'\\/ \n\t+.%é#$&"
WRAPS = {
    "lfm2_pythonic": "<|tool_call_start|>[{}]<|tool_call_end|>",
    "llama4_pythonic": "<|python_start|>[{}]<|python_end|>",
    "olmo3_pythonic": "<function_calls>\n{}\n</function_calls>",
    "pythonic": "[{}]",
}
each_family = pytest.mark.parametrize("family", WRAPS)


def tool(name: str, **properties: Any) -> dict[str, Any]:
    return {"name": name, "parameters": {"type": "object", "properties": properties}}


TEXT: Final = {"type": "string"}
TOOLS: Final = [
    tool("run", command=TEXT, n={"type": "integer"}, xs={"type": "array"}),
    tool("write", path=TEXT, content=TEXT),
    tool("now"),
]


def read(
    family: str, calls: Sequence[str], tools: list[dict[str, Any]] = TOOLS
) -> tuple[list[tuple[str, str]], str, int]:
    """The calls, the text and the number of malformed calls of an output, the same in every split."""
    raw = WRAPS[family].format(("\n" if family == "olmo3_pythonic" else ", ").join(calls))
    case = Case("", family, raw, "", "", [], tools, False)
    whole = replay(case)
    assert replay(case, range(1, len(raw))) == whole
    assert all(replay(case, [at]) == whole for at in range(0, len(raw), 7))
    return [(call.name, call.arguments) for call in calls_of(whole[0])], text_of(whole[0], DeltaKind.TEXT), whole[1]


def values(calls: list[tuple[str, str]]) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in calls]


def a_string(rng: random.Random) -> str:
    return "".join(rng.choices(ALPHABET, k=rng.randint(0, 12)))


def a_value(rng: random.Random, depth: int = 0) -> Any:
    match rng.randrange(8 if depth < 3 else 4):
        case 0:
            return rng.choice([None, True, False, 0, -7, 1.5, 10**6])
        case 1 | 2 | 3:
            return a_string(rng)
        case 4:
            return tuple(a_value(rng, depth + 1) for _ in range(rng.randint(2, 3)))
        case 5:
            return {a_string(rng): a_value(rng, depth + 1) for _ in range(rng.randint(0, 3))}
        case _:
            return [a_value(rng, depth + 1) for _ in range(rng.randint(0, 3))]


@each_family
def test_calls_that_python_can_read_are_read_as_python_reads_them(family: str) -> None:
    rng = random.Random(family)
    for _ in range(60):
        calls = [{f"k{n}": a_value(rng) for n in range(rng.randint(0, 3))} for _ in range(rng.randint(1, 3))]
        separator = rng.choice([", ", ","]) if family != "olmo3_pythonic" else "\n"
        text = separator.join(f"f({', '.join(f'{key}={value!r}' for key, value in call.items())})" for call in calls)
        after = rng.choice(["", "\nDone.", "\n\n**Done**", " (done)", "Done", "\n- one\n- two", '\n"x"', " 完成"])
        case = Case("", family, WRAPS[family].format(text) + after, "", "", [], [], False)
        assert ast.parse(f"[{text}]" if separator != "\n" else text)
        events, malformed = replay(case)
        assert [json.loads(call.arguments) for call in calls_of(events)] == json.loads(json.dumps(calls)), case.raw
        assert malformed == 0
        assert text_of(events, DeltaKind.TEXT).strip() == after.strip()
        assert replay(case, range(1, len(case.raw))) == (events, malformed)


@pytest.mark.parametrize("quote", ["'", '"'])
def test_no_split_changes_what_a_string_with_inner_quotes_is(quote: str) -> None:
    rng = random.Random(quote)
    pieces = [quote, " ", ",", ")", "]", "}", "=", "x=", ":", "f(", "<", "</a>", "<|", "\\", "word", "\n", ".j(", "+ "]
    for _ in range(400):
        inner = "".join(rng.choices(pieces, k=rng.randint(1, 12)))
        form = rng.choice(["f(a={})", "f(a=[1, {}])", "f(a={{'k': {}}})", "f(a={{{}: 1}})"])
        call = form.format(quote + inner + quote)
        family = rng.choice(sorted(WRAPS))
        case = Case("", family, WRAPS[family].format(call), "", "", [], [], False)
        whole = replay(case)
        for cuts in (range(1, len(case.raw)), random_cuts(case.raw, rng)):
            assert replay(case, cuts) == whole, f"{case.family} {case.raw!r}"


@pytest.mark.parametrize(
    "text", ['" ', 'x" y', '",', '")', '")]', '" , a', '"), f( ', '", a=1', '"\n' + " " * 300, '"' + ")]" * 9]
)
def test_inner_quotes_cost_no_more_than_their_number(text: str) -> None:
    parser = make_parser("lfm2_pythonic")
    began = time.process_time()
    raw = '<|tool_call_start|>[f(a="' + text * (50_000 // len(text))
    for at in range(0, len(raw), 16):
        parser.feed(raw[at : at + 16])
    parser.finish()
    # Linear work takes a tenth of this; quadratic work takes minutes.
    assert time.process_time() - began < 5


CODE: Final = [
    'f("a"), now()', 'x "a"), now()', 'x = f("a", path="b")', 'print("a", n=2)', 'print("a", end="")', 'x "a")]',
    'python -c "print("a", n="b")"', 'plot("x", lw=2)', '[run(command="ls"), now()]', 'say [run(command="ls")] now',
    'f("a"), run(command="b")', 'print("a" + x)', 'x = "a".join(b)', '{"a": "b", "n": 1}', 'cut -d"," -f2 x',
    'cut -d" " -f1 x', 'grep -n "def f(" x', 'say ")]" twice', 'f(x="a", n="b", content="c")',
    '"a", "b"', '<p>"hi"</p>', 'def f():\n    """doc."""\n    return "x"', 'f"x={x}, n={n}"', 'print("a")\n',
]  # fmt: skip


@each_family
@pytest.mark.parametrize("code", CODE)
@pytest.mark.parametrize("quote", ["'", '"'])
def test_code_in_a_string_adds_no_argument_and_no_call(family: str, code: str, quote: str) -> None:
    value = code.replace('"', quote)
    string = quote + value + quote
    for written, expected in (
        ([f"run(command={string})"], [("run", {"command": value})]),
        ([f"write(path={quote}p{quote}, content={string})"], [("write", {"path": "p", "content": value})]),
        ([f"run(command={string}, n=1)", "now()"], [("run", {"command": value, "n": 1}), ("now", {})]),
    ):
        calls, text, malformed = read(family, written)
        assert (values(calls), text, malformed) == (expected, "", 0)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ('["f("a", "b")", "c"]', ['f("a", "b")', "c"]),
        ('["say "a"", "b"]', ['say "a"', "b"]),
        ('["bash", "-c", "echo "a""]', ["bash", "-c", 'echo "a"']),
        ('[{"k": "{"a": "b", "c": 1}", "l": "d"}]', [{"k": '{"a": "b", "c": 1}', "l": "d"}]),
        ('["a: ", "", "("]', ["a: ", "", "("]),
        ('["a"  # one\n, "b",  # two\n]', ["a", "b"]),
    ],
)
def test_strings_of_a_list_are_those_that_were_written(written: str, value: Any) -> None:
    for family in WRAPS:
        calls, _, malformed = read(family, [f"run(xs={written}, n=2)"])
        assert (values(calls), malformed) == ([("run", {"xs": value, "n": 2})], 0)


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('path="a",  # the path, don\'t\n content="b"', {"path": "a", "content": "b"}),
        ('path="a" # "a"\n, content="b"', {"path": "a", "content": "b"}),
        ('path="a", content="one "\n    "two"', {"path": "a", "content": "one two"}),
        ('path="a", content="one"\n"two",', {"path": "a", "content": "onetwo"}),
        ('path="a", content="""say "b""""', {"path": "a", "content": 'say "b"'}),
        ('path="a", content="""say "b"""" ', {"path": "a", "content": 'say "b"'}),
        ('path="a", content="""x = """b""", y"""', {"path": "a", "content": 'x = """b""", y'}),
        ('path="a", mode="w"', {"path": "a", "mode": "w"}),
        ("path='it's', content='the dogs' bowls'", {"path": "it's", "content": "the dogs' bowls"}),
        ('path="5" disk", content="b"', {"path": '5" disk', "content": "b"}),
    ],
)
@each_family
def test_comments_joined_strings_and_apostrophes_end_no_argument_early(
    family: str, written: str, arguments: dict[str, Any]
) -> None:
    calls, text, malformed = read(family, [f"write({written})", "now()"])
    assert (values(calls), text, malformed) == ([("write", arguments), ("now", {})], "", 0)


@pytest.mark.parametrize(
    "written",
    [
        'path="a", "b"', 'path="a ", "b"', 'path="/a/", "b"', 'content="a", path=f"b"', 'content="a", path=str("b")',
        'content="a", path=p', 'content="a" if x else "b"', 'content="a" or "b"', 'content="a"+"b", path="c"',
        'content="a"[0], path="b"', 'content="a"*3, path="b"', 'content="a" in "b", path="c"', 'content=("a")',
        'path="a, content="b"', 'path="a", content=b"', 'content="print("a), path="b"', 'content="echo "a, path="b"',
        'content="say "a", path="b"', 'content="a "b"", mode="w"', 'content="a "b" + ", path=" + c"',
        'content="print("p" + ", path=" + p)", path="q"', 'content="a", content="b"', 'path="C:\\", content="x"',
    ],
)  # fmt: skip
@each_family
def test_an_argument_whose_end_is_in_doubt_makes_the_call_malformed(family: str, written: str) -> None:
    calls, _, malformed = read(family, [f"write({written})"])
    assert [name for name, arguments in calls if is_json(arguments)] == []
    assert malformed == 1


@pytest.mark.parametrize("written", ['xs=["say ", "x""]', 'xs=["now(",",", ")", "z "a""]', 'xs=["a "b" ","", "z"]'])
def test_separators_of_a_list_that_may_be_quoted_make_the_call_malformed(written: str) -> None:
    for family in WRAPS:
        calls, _, malformed = read(family, [f"run({written})"])
        assert (malformed, any(is_json(arguments) for _, arguments in calls)) == (1, False)


@pytest.mark.parametrize("rest", ['")', " and now()", " x", ".x", "[0]", " | now()", ', "x"', " now"])
def test_what_nothing_reads_in_a_list_makes_the_call_before_it_malformed(rest: str) -> None:
    for family in WRAPS:
        calls, _, malformed = read(family, [f"run(n=1){rest}"])
        assert (malformed, [is_json(arguments) for _, arguments in calls]) == (1, [False])


def test_a_tool_that_allows_other_arguments_or_declares_none_ends_a_string_before_any() -> None:
    schemas = [{"properties": {"command": TEXT}, "additionalProperties": True}, {"properties": {}}, {}]
    for schema in schemas:
        tools = [{"name": "run", "parameters": {"type": "object", **schema}}]
        calls, _, malformed = read("pythonic", ['run(command="a "b" c", mode="w")'], tools)
        assert (values(calls), malformed) == ([("run", {"command": 'a "b" c', "mode": "w"})], 0)


def test_a_long_list_behind_a_string_is_not_held_back() -> None:
    parser = make_parser("pythonic", tools=TOOLS)
    events = parser.feed('[run(command="ls", xs=[') + [event for _ in range(400) for event in parser.feed("1, ")]
    written = "".join(event.text for event in events if event.kind is DeltaKind.TOOL_ARGS)
    assert written.startswith('{"command": "ls", "xs": [1, 1')
