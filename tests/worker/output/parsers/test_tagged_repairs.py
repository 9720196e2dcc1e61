"""Tagged calls that are not written as their format demands: they have all their arguments, or they are malformed."""

import json
from typing import Any, Final

import pytest

from protocol.from_worker import DeltaKind
from tests.worker.output.parsers.replay import Case, calls_of, replay, text_of
from tests.worker.output.parsers.tagged_calls import TAGGED, rendered


def tool(name: str, **kinds: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in kinds.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


TOOLS: Final = [tool("write", path="string", body="string", limit="integer"), tool("now")]
CALL: Final = ("write", {"path": "a", "body": "b"})
each_family = pytest.mark.parametrize("family", TAGGED)
wrapped = pytest.mark.parametrize(
    "family", [family for family, known in TAGGED.items() if known.form.wrap and known.form.call]
)
keyed = pytest.mark.parametrize("family", [family for family, known in TAGGED.items() if known.form.value])


def read(family: str, raw: str, in_reasoning: bool = False) -> tuple[list[Any], str, str, int]:
    """The calls, content, reasoning and malformed calls of an output, which are the same for every cut in two."""
    case = Case("", family, raw, "", "", [], TOOLS, in_reasoning)
    whole = events, malformed = replay(case)
    for at in range(1, len(raw)):
        assert replay(case, [at]) == whole
    assert replay(case, range(1, len(raw))) == whole
    calls = [(call.name, json.loads(call.arguments) if not malformed else call.arguments) for call in calls_of(events)]
    return calls, text_of(events, DeltaKind.TEXT), text_of(events, DeltaKind.REASONING), malformed


def parts(family: str) -> tuple[str, str]:
    """What stands before and behind the parameters of a call."""
    form = TAGGED[family].form
    raw = rendered(family, [CALL])
    at = raw.index(form.param + TAGGED[family].look.key.partition("{")[0])
    return raw[:at], raw[raw.rindex(form.call_end) :]


@each_family
def test_a_json_object_in_place_of_parameters_is_the_arguments(family: str) -> None:
    start, end = parts(family)
    calls, content, _, malformed = read(family, start + '{"path": "a", "body": "b"}' + end)
    assert (calls, content.strip(), malformed) == ([CALL], "", 0)


@each_family
@pytest.mark.parametrize("text", ["then what", "path: a", "<x>a</x>", "[1]"])
def test_text_in_place_of_parameters_makes_a_call_malformed(family: str, text: str) -> None:
    start, end = parts(family)
    calls, content, _, malformed = read(family, start + text + end)
    assert not calls
    assert text in content
    assert malformed or family == "muse"


@pytest.mark.parametrize("family", [family for family, known in TAGGED.items() if not known.form.value])
def test_tags_with_the_names_of_parameters_are_the_parameters(family: str) -> None:
    start, end = parts(family)
    calls, _, _, malformed = read(family, start + "<path>a</path>\n<body>use </body> and </path>.</body>" + end)
    assert (calls, malformed) == ([("write", {"path": "a", "body": "use </body> and </path>."})], 0)


@each_family
def test_a_parameter_follows_another_one_whose_end_marker_is_missing(family: str) -> None:
    form = TAGGED[family].form
    raw = rendered(family, [("write", {"path": "a", "limit": "3"})])
    whole_end = TAGGED[family].look.before_end + form.param_end + TAGGED[family].look.after
    at = raw.index(whole_end)
    for gap in ("\n", "" if TAGGED[family].look.before_end == "" else "\n"):
        calls, _, _, malformed = read(family, raw[:at] + gap + raw[at + len(whole_end) :])
        assert (calls, malformed) == ([("write", {"path": "a", "limit": 3})], 0)


@each_family
def test_a_key_is_never_written_twice(family: str) -> None:
    start, end = parts(family)

    def body(**arguments: str) -> str:
        return rendered(family, [("write", arguments)]).removeprefix(start).removesuffix(end)

    calls, _, _, malformed = read(family, start + body(limit="3", path="a") + body(path="b") + end)
    [(name, arguments)] = calls
    assert not malformed
    assert (name, set(arguments), arguments["limit"]) == ("write", {"limit", "path"}, 3)
    assert arguments["path"].startswith("a")
    # A number cannot go on, so that no reading of this call is right.
    calls, _, _, malformed = read(family, start + body(limit="3") * 2 + end)
    assert (calls, malformed) == ([("write", "")], 1)


@keyed
def test_markers_that_are_missing_before_a_value_are_found_where_one_reading_is_possible(family: str) -> None:
    form = TAGGED[family].form
    raw = rendered(family, [CALL])
    want = ([CALL], 0)
    for missing in (form.value, form.param):
        calls, _, _, malformed = read(family, raw.replace(missing, "", 1))
        assert (calls, malformed) == want
    if not form.call:
        calls, _, _, malformed = read(
            family, raw.replace("write\n" + form.param, "write", 1).replace(form.param, "", 1)
        )
        assert (calls, malformed) == want


@wrapped
def test_text_in_a_wrapper_is_content_without_the_wrapper(family: str) -> None:
    form = TAGGED[family].form
    raw = rendered(family, [CALL])
    wrap = form.wrap[TAGGED[family].wrap_at]
    calls, content, _, malformed = read(family, raw.replace(wrap, wrap + "Let me write it.", 1))
    assert (calls, content.strip(), malformed) == ([CALL], "Let me write it.", 0)
    calls, content, _, malformed = read(family, raw.replace(form.call_end, form.call_end + "\nThat was it.\n", 1))
    assert (calls, content.strip(), malformed) == ([CALL], "That was it.", 0)


@pytest.mark.parametrize("name", ["write", "undeclared"])
@pytest.mark.parametrize("gap", ["\n", ""])
def test_a_call_within_a_line_of_a_thought_is_one_on_its_own_line_or_of_a_declared_tool(name: str, gap: str) -> None:
    raw = f"I must. <tool_call>{gap}<function={name}>\n<parameter=path>\na\n</parameter>\n</function>\n</tool_call>"
    calls, _, reasoning, _ = read("qwen3_coder", raw, in_reasoning=True)
    if gap or name == "write":
        assert (calls, reasoning) == ([(name, {"path": "a"})], "I must.")
    else:
        assert (calls, reasoning) == ([], raw)


@pytest.mark.parametrize("family", ["deepseek_v32", "deepseek_v4", "muse", "step3"])
def test_a_parameter_without_the_namespace_of_its_markers_is_read(family: str) -> None:
    raw = rendered(family, [CALL])
    plain = TAGGED[family].form.param.replace("｜DSML｜", "").replace("atem:", "").replace("steptml:", "")
    calls, _, _, malformed = read(family, raw.replace(TAGGED[family].form.param, plain))
    assert (calls, malformed) == ([CALL], 0)


@pytest.mark.parametrize(
    ("fields", "arguments"),
    [
        ('"path": "a", "limit": "3"', {"path": "a", "limit": 3}),
        ('"path": 7', {"path": "7"}),
        ('"path": "a", "unknown": 1', None),
        ('"limit": 3, "arguments": {"path": "a"}', None),
        ('"arguments": {"path": "a"}, "limit": 3', None),
        ('"thought": "x", "arguments": {"path": "a"}', {"path": "a"}),
    ],
)
def test_flat_arguments_of_a_json_call_are_read_or_the_call_is_malformed(
    fields: str, arguments: dict[str, Any] | None
) -> None:
    calls, _, _, malformed = read("hermes", f'<tool_call>\n{{"name": "write", {fields}}}\n</tool_call>')
    assert calls == [("write", arguments)] if arguments else malformed == 1


@each_family
@pytest.mark.parametrize("gap", ["", "\n"])
def test_an_end_of_the_call_that_is_written_twice_is_no_text_of_its_last_value(family: str, gap: str) -> None:
    form = TAGGED[family].form
    raw = rendered(family, [CALL])
    calls, _, _, malformed = read(family, raw + gap + form.call_end)
    assert (calls, malformed) == ([CALL], 0)
    calls, _, _, malformed = read(family, raw.replace(form.call_end, form.call_end + gap + form.call_end))
    assert (calls, malformed) == ([CALL], 0)


@each_family
def test_a_parameter_behind_a_quoted_call_without_an_end_is_not_lost_without_a_report(family: str) -> None:
    quoted = rendered(family, [("now", {"limit": "1"})])
    form = TAGGED[family].form
    unfinished = quoted[: quoted.rindex(form.param_end)]
    raw = rendered(family, [("write", {"body": unfinished, "path": "a"})])
    calls, _, _, malformed = read(family, raw)
    assert malformed or calls == [("write", {"body": unfinished, "path": "a"})]


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "write", "arguments": {}, "parameters": {"path": "a"}}',
        '{"name": "write", "arguments": {"path": "a"}, "arguments": {"body": "b"}}',
        '{"arguments": {"path": "a"}, "args": {"body": "b"}, "name": "write"}',
        '{"name": "write", "name": "now", "arguments": {"path": "a"}}',
    ],
)
def test_second_arguments_and_another_name_make_a_json_call_malformed(text: str) -> None:
    assert read("hermes", f"<tool_call>{text}</tool_call>")[-1] == 1


def test_a_name_that_is_written_twice_is_one_name() -> None:
    text = '{"type": "function", "function": "write", "name": "write", "arguments": {"path": "a"}}'
    calls, _, _, malformed = read("hermes", f"<tool_call>{text}</tool_call>")
    assert (calls, malformed) == ([("write", {"path": "a"})], 0)
