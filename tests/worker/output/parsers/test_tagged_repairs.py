"""Tagged calls that are not written as their format demands: they have all their arguments, or they are malformed."""

import json
import re
from collections.abc import Callable
from typing import Any, Final

import pytest

from protocol.from_worker import DeltaKind
from tests.worker.output.parsers.replay import Case, calls_of, is_json, replay, some_cuts, text_of
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
    for at in some_cuts(raw):
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
def test_a_key_is_written_twice_only_with_equal_values(family: str) -> None:
    start, end = parts(family)

    def body(**arguments: str) -> str:
        return rendered(family, [("write", arguments)]).removeprefix(start).removesuffix(end)

    for first, second in (("a", "b"), ("a", ""), ("", "a")):
        for between in ("", body(limit="3")):
            calls, content, _, malformed = read(family, start + body(path=first) + between + body(path=second) + end)
            assert (calls[0][0], len(calls), content.strip(), malformed) == ("write", 1, "", 1)
            assert not is_json(calls[0][1])
    calls, _, _, malformed = read(family, start + body(limit="3") + body(limit="4") + end)
    assert (calls, malformed) == ([("write", '{"limit": 3')], 1)
    twice = body(path="a") * 2 + body(limit="3") + body(path="a")
    assert read(family, start + twice + end) == ([("write", {"path": "a", "limit": 3})], "", "", 0)


@each_family
def test_a_key_that_a_value_quotes_with_both_of_its_markers_is_not_written_twice(family: str) -> None:
    start, end = parts(family)
    quoted = rendered(family, [("write", {"path": "b"})]).removeprefix(start).removesuffix(end)
    call = ("write", {"path": "a", "body": f"Use {quoted}{quoted}as often as needed."})
    assert read(family, rendered(family, [call])) == ([call], "", "", 0)


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


@each_family
@pytest.mark.parametrize("gap", ["", "\n"])
def test_an_end_of_a_value_is_no_text_in_any_spelling_and_if_it_is_written_again(family: str, gap: str) -> None:
    form = TAGGED[family].form
    raw, end = rendered(family, [CALL]), form.param_end
    spelled = [end + gap + end, end + gap + end + gap + end]
    if end.endswith(">") and not end.endswith("|>"):
        spelled += [end[:-1] + " >" + gap, end[:-1] + "\n>" + gap, end.upper() + gap]
    for text in spelled:
        calls, content, _, malformed = read(family, raw.replace(end, text))
        assert (calls, content, malformed) == ([CALL], "", 0), text
    tail = raw[raw.rindex(end) :]
    calls, content, _, malformed = read(family, raw + gap + tail + "\nDone.")
    assert (calls, content.strip(), malformed) == ([CALL], "Done.", 0)


@pytest.mark.parametrize("family", ["qwen3_coder", "seed_oss"])
def test_an_end_of_a_value_may_name_its_key_and_no_other(family: str) -> None:
    raw = rendered(family, [CALL])
    first, second, rest = raw.split("</parameter>")
    calls, _, _, malformed = read(family, f"{first}</parameter=path>{second}</parameter=body>{rest}")
    assert (calls, malformed) == ([CALL], 0)
    value = "x</parameter=other>\n</parameter and more"
    calls, _, _, malformed = read(family, rendered(family, [("write", {"path": value, "limit": "3"})]))
    assert (calls, malformed) == ([("write", {"path": value, "limit": 3})], 0)


@each_family
def test_a_value_that_quotes_a_parameter_keeps_both_of_its_markers(family: str) -> None:
    form = TAGGED[family].form
    before, after = rendered(family, [("write", {"path": "a", "body": "|body|"})]).split("|body|")
    body = "Use " + rendered(family, [("write", {"path": "a", "body": "b"})]).split(form.param, 2)[1]
    body = (body[:4] + form.param + body[4:]).rstrip()
    assert body.endswith(form.param_end)
    calls, _, _, malformed = read(family, before + body + after)
    assert (calls, malformed) == ([("write", {"path": "a", "body": body})], 0)


@each_family
def test_start_and_end_markers_that_are_written_again_are_no_content(family: str) -> None:
    form = TAGGED[family].form
    wrap, wrap_end = form.wrap[TAGGED[family].wrap_at :], form.wrap_end[TAGGED[family].wrap_at :]
    raw = rendered(family, [CALL])
    for marker in filter(None, (*wrap[:1], form.call, *wrap_end[:1])):
        for gap in ("", "\n"):
            calls, content, _, malformed = read(family, raw.replace(marker, marker + gap + marker))
            assert (calls, content, malformed) == ([CALL], "", 0), marker


@pytest.mark.parametrize("family", ["step3"])
@pytest.mark.parametrize("marker", ["<｜tool_call_begin｜>", "<｜tool_sep｜>", "</steptml:invoke>"])
def test_line_breaks_between_the_tags_of_a_marker_are_markup(family: str, marker: str) -> None:
    calls, content, _, malformed = read(family, rendered(family, [CALL]).replace(marker, marker + "\n"))
    assert (calls, content, malformed) == ([CALL], "", 0)


@each_family
@pytest.mark.parametrize("value", ["\nls", "\n\nls\n\n", "a\r\nb", "a\r\n"])
def test_a_value_has_its_own_line_breaks_and_no_others(family: str, value: str) -> None:
    call = ("write", {"path": "a", "body": value})
    calls, _, _, malformed = read(family, rendered(family, [call]))
    assert (calls, malformed) == ([call], 0)
    calls, _, _, malformed = read(family, rendered(family, [CALL]).replace("\n", "\r\n"))
    assert (calls, malformed) == ([CALL], 0)


@pytest.mark.parametrize("family", ["deepseek_v32", "muse", "step3", "qwen3_coder", "seed_oss", "minimax_m2"])
def test_a_parameter_in_another_spelling_follows_one_in_the_own(family: str) -> None:
    form = TAGGED[family].form
    raw = rendered(family, [CALL])
    start = raw.rindex(form.param)
    end = start + len(form.param + TAGGED[family].look.key.partition("{")[0] + "body")
    for spelled in ('<parameter name="body"', "<parameter name = 'body' ", '<PARAMETER NAME="body"'):
        rest = raw[end:].removeprefix('"').removeprefix(' string="true"').replace("{is_string}", "true")
        rest = rest[rest.index(">") :]
        calls, _, _, malformed = read(family, raw[:start] + spelled + rest)
        assert (calls, malformed) == ([CALL], 0), spelled


@pytest.mark.parametrize("family", ["qwen3_coder", "seed_oss", "minimax_m2", "dots", "deepseek_v32"])
def test_a_tag_that_closes_itself_is_an_empty_value_or_a_call_without_parameters(family: str) -> None:
    form, look = TAGGED[family].form, TAGGED[family].look
    raw = rendered(family, [("write", {"path": "||", "body": "b"})])
    value = ">" + look.value + "||" + look.before_end + form.param_end
    assert value in raw
    calls, _, _, malformed = read(family, raw.replace(value, "/>"))
    assert (calls, malformed) == ([("write", {"path": "", "body": "b"})], 0)
    raw = rendered(family, [("now", {})])
    calls, content, _, malformed = read(family, raw.replace(">" + look.head + form.call_end, " />"))
    assert (calls, content, malformed) == ([("now", {})], "", 0)


@each_family
def test_a_value_that_may_hold_the_next_argument_or_call_makes_the_call_malformed(family: str) -> None:
    form = TAGGED[family].form
    raw = rendered(family, [CALL])
    end = raw.index(form.param_end) + len(form.param_end)
    calls, _, _, malformed = read(family, raw[:end] + "\nand " + raw[end:].lstrip())
    assert (calls[0][0], malformed) == ("write", 1)
    # The end of the first call is missing.
    both = rendered(family, [CALL, ("write", {"path": "c", "body": "d"})])
    calls, _, _, malformed = read(family, both.replace(form.call_end, "", 1))
    assert malformed == 1 or calls == [CALL, ("write", {"path": "c", "body": "d"})]


@pytest.mark.parametrize("family", [family for family, known in TAGGED.items() if not known.form.value])
def test_a_start_of_a_value_that_is_written_again_is_never_its_text_without_a_report(family: str) -> None:
    raw = rendered(family, [("write", {"limit": "3", "body": "b"})])
    first, second = re.findall(re.escape(TAGGED[family].form.param) + r"[^<]*?(?:<\|sep\|>|>)\n?", raw)[:2]
    calls, _, _, malformed = read(family, raw.replace(first, first + first))
    assert (calls, malformed) == ([("write", {"limit": 3, "body": "b"})], 0)
    assert read(family, raw.replace(second, second + second))[-1] == 1


CALLS: Final = {
    "hermes": '<tool_call>\n{"name": "write", "arguments": {"path": "a"}}\n</tool_call>',
    "jamba": '<tool_calls>[{"name": "write", "arguments": {"path": "a"}}]</tool_calls>',
    "command_r7b": '<|START_ACTION|>[{"tool_name": "write", "parameters": {"path": "a"}}]<|END_ACTION|>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.write:0<|tool_call_argument_begin|>"
    '{"path": "a"}<|tool_call_end|><|tool_calls_section_end|>',
    "deepseek_v31": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>write<｜tool▁sep｜>{"path": "a"}<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>",
    "solar_open": '<|tool_calls|><|tool_call:begin|>id<|tool_call:name|>write<|tool_call:args|>{"path": "a"}'
    "<|tool_call:end|><|calls|>",
    "mistral": '[TOOL_CALLS]write[ARGS]{"path": "a"}',
}


@pytest.mark.parametrize("family", CALLS)
@pytest.mark.parametrize("gap", ["", "\n"])
def test_any_marker_around_json_may_be_written_again(family: str, gap: str) -> None:
    raw = CALLS[family]
    for marker in re.findall(r"<[^<>]*>|\[[A-Z_]+\]", raw):
        calls, content, _, malformed = read(family, raw.replace(marker, marker + gap + marker))
        assert (calls, content, malformed) == ([("write", {"path": "a"})], "", 0), marker


@pytest.mark.parametrize("family", ["kimi_k2", "deepseek_v31", "solar_open"])
def test_text_in_a_section_before_its_first_call_is_content(family: str) -> None:
    section = CALLS[family].partition(">")[0] + ">"
    calls, content, _, malformed = read(family, CALLS[family].replace(section, section + "Let me write.\n", 1))
    assert (calls, content.strip(), malformed) == ([("write", {"path": "a"})], "Let me write.", 0)
    head, call = re.findall(r"<[^<>]*>", CALLS[family])[:2]
    inner = CALLS[family].removeprefix(head + call).rpartition("<")[0]
    calls, content, _, malformed = read(family, head + inner + call + inner)
    assert [name for name, _ in calls] == ["write", "write"]


@pytest.mark.parametrize("family", ["hermes", "jamba", "command_r7b"])
def test_text_behind_a_json_call_is_content_without_the_end_marker(family: str) -> None:
    raw = CALLS[family]
    end = raw[raw.rindex("<") :]
    for text, malformed in ((" That is it.", 0), (', {"limit": 1}', 1), (' "limit": 1', 1)):
        calls, content, _, count = read(family, raw.removesuffix(end).removesuffix("]") + text + end)
        assert (calls[0][0], content.strip(), count) == ("write", text.strip(), malformed)
    calls, content, _, count = read(family, raw.removesuffix(end).replace("}}", "}},") + end)
    assert (calls, content, count) == ([("write", {"path": "a"})], "", 0)


def test_a_call_of_mistral_may_have_no_arguments_and_no_marker_of_its_own() -> None:
    write = '[ARGS]{"path": "a"}'
    both = [("now", {}), ("write", {"path": "a"})]
    for raw in (f"[TOOL_CALLS]now[ARGS][TOOL_CALLS]write{write}", f"[TOOL_CALLS]now[TOOL_CALLS]write{write}"):
        assert read("mistral", raw) == (both, "", "", 0)
    assert read("mistral", "[TOOL_CALLS]now[ARGS]") == ([("now", {})], "", "", 0)
    assert read("mistral", f"[TOOL_CALLS]write{write}write{write}")[0] == [both[1]] * 2
    assert read("mistral", "[TOOL_CALLS]write[ARGS]")[-1] == 1


def spaced(tag: str) -> str:
    return f"< {tag[1:-1]} >"


STYLES: Final[list[Callable[[str], str]]] = [str.upper, str.title, spaced]


@pytest.mark.parametrize("family", ["hermes", "jamba", "qwen3_coder", "glm47", "minimax_m2", "seed_oss", "dots"])
@pytest.mark.parametrize("style", STYLES)
def test_the_tags_around_calls_may_have_capitals_and_blanks(family: str, style: Callable[[str], str]) -> None:
    raw = CALLS.get(family) or rendered(family, [("write", {"path": "a"})])
    first, last = re.findall(r"<[^<>]*>", raw)[:: len(re.findall(r"<[^<>]*>", raw)) - 1]
    end = style(last) if " " not in style(last) else f"</ {last[2:-1]} >"
    styled = style(first) + raw.removeprefix(first).removesuffix(last) + end
    assert read(family, styled) == ([("write", {"path": "a"})], "", "", 0)
    assert read(family, f"Note {style(first)} so")[:2] == ([], f"Note {style(first)} so")


@each_family
@pytest.mark.parametrize("text", ["", "\nDone."])
def test_an_end_marker_that_the_end_of_the_output_cuts_is_no_content(family: str, text: str) -> None:
    form = TAGGED[family].form
    raw = rendered(family, [CALL])
    ends = [form.call_end, *form.wrap_end[TAGGED[family].wrap_at :][:1]]
    at = raw.rindex(ends[-1])
    for size in range(len(ends[-1]) - 3, len(ends[-1])):
        whole, is_inside = raw[: at + size], len(ends) == 1
        if not text or not (is_inside or family == "muse"):
            calls, content, _, malformed = read(family, raw[:at] + text + ends[-1][:size])
            assert (calls, content.strip(), malformed) == ([CALL], text.strip(), 0), whole


def test_an_end_marker_of_a_json_call_that_the_end_of_the_output_cuts_is_no_content() -> None:
    for family in ("hermes", "jamba", "command_r7b", "kimi_k2", "deepseek_v31"):
        assert read(family, CALLS[family][:-1]) == ([("write", {"path": "a"})], "", "", 0)
    assert read("hermes", CALLS["hermes"] + "\nUse </tool_ca")[1] == "Use </tool_ca"


@keyed
def test_a_marker_before_a_value_that_is_written_again_is_never_its_text_without_a_report(family: str) -> None:
    form = TAGGED[family].form
    raw = rendered(family, [CALL])
    calls, _, _, malformed = read(family, raw.replace(form.value, form.value * 2, 1))
    assert malformed == 1
    calls, _, _, malformed = read(family, raw.replace(form.key_end, form.param, 1))
    assert (calls, malformed) == ([], 1)
    call = ("write", {"path": f"{form.value}a{form.param_end}", "body": "b"})
    assert read(family, rendered(family, [call])) == ([call], "", "", 0)
