"""Grammars of each format's tool calls, built from the format objects that `worker.output.parsers` uses."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from worker.output.parsers.gemma import GemmaCalls
from worker.output.parsers.json_calls import JsonCalls
from worker.output.parsers.named import MistralCalls, RecipientJson, SectionCalls, TaggedJson
from worker.output.parsers.pythonic import PythonCalls
from worker.structured.tool_grammar.lark import Lark, either
from worker.structured.tool_grammar.schemas import ToolSchema
from worker.structured.tool_grammar.values import PYTHON, Style, Values, whole_json

# Maximum number of calls in one answer, if the grammar is the only limit.
MAX_CALLS: Final = 16
# Maximum number of calls if each contains its index, because each makes the grammar longer.
MAX_NUMBERED_CALLS: Final = 4


@dataclass(frozen=True, slots=True)
class Shape:
    """Grammar of one answer of calls: `start`, `first`, each of `more`, then `tail`.

    `start` is text; the others are expressions. Early finish uses `value_ends`, texts that end a value, and `ends`,
    texts that end a call or all calls, in order of how much they end, the most first.
    """

    start: str
    first: str
    more: tuple[str, ...] = ()
    tail: str = ""
    value_ends: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class JsonShape:
    """Notation of a family's calls as JSON objects.

    `many` is the notation of several calls: a `list` in brackets, objects between the `same` markers, or markers around
    `each`. `gap` is written inside the markers; `before` are fields in front of the name, with `{index}` for the call's
    index.
    """

    many: str = "each"
    name: str = "name"
    arguments: str = "arguments"
    gap: str = "\n"
    between: str = "\n"
    before: str = ""


_LIST: Final = JsonShape("list", gap="", between=", ")
_COHERE: Final = JsonShape("list", "tool_name", "parameters", "", ", ", '"tool_call_id": "{index}", ')
_LLAMA: Final = JsonShape("same", arguments="parameters", gap="", between="; ")
JSON_SHAPES: Final[dict[str, JsonShape]] = {
    **dict.fromkeys(
        (
            "apertus", "apriel", "apriel16", "granite", "granite3", "granite_thinking", "hunyuan_a13b", "jamba",
            "mistral_v3", "nemotron_v2", "phi4mini", "xlam",
        ),
        _LIST,
    ),
    "command_a": _COHERE,
    "command_r7b": _COHERE,
    "command_r": JsonShape("list", "tool_name", "parameters", "\n", ", "),
    "gigachat": JsonShape("same", gap="", between=""),
    "granite_20b_fc": JsonShape(gap="", between="\n"),
    "internlm2": JsonShape(arguments="parameters"),
    "llama3_json": _LLAMA,
    "llama4_pythonic": _LLAMA,
    "minimax_m1": JsonShape("same"),
}  # fmt: skip
# Families that write only one call per answer.
SINGLE: Final = frozenset({"gigachat", "granite_20b_fc", "harmony"})


def json_shape(lark: Lark, form: JsonCalls, family: str, tools: Sequence[ToolSchema]) -> Shape:
    shape = JSON_SHAPES.get(family, JsonShape())
    start = "" if form.bare else lark.marks.known(form.starts)
    end = lark.marks.known(form.ends)
    if shape is _LIST and start == "<tool_call>":
        shape = JsonShape()  # Granite 4 writes separate objects
    is_list = shape.many == "list"
    # The start marker of one format includes the bracket.
    has_bracket = is_list and not start.endswith("[")
    open_, close = shape.gap + "[" * has_bracket, "]" * is_list + shape.gap + end

    def call(index: int) -> str:
        if form.keyed:
            objects = [lark.text(f"{{{json.dumps(tool.name)}: ") + f' {whole_json(lark, tool)} "}}"' for tool in tools]
            return either(objects)
        before = shape.before.replace("{index}", str(index))
        head = lark.text(f'{{{before}"{shape.name}": ')
        middle = lark.text(f', "{shape.arguments}": ')
        names = [f"{lark.text(json.dumps(tool.name))} {middle} {whole_json(lark, tool)}" for tool in tools]
        return f'{head} {either(names)} "}}"'

    if shape.many == "each":
        first = f"{lark.text(open_)} {call(0)} {lark.text(close)}"
        return Shape(start, first, (lark.rule(f"{lark.text(shape.between + start)} {first}"),) * MAX_CALLS)
    numbers = MAX_NUMBERED_CALLS if shape.before else MAX_CALLS
    more = tuple(lark.rule(f"{lark.text(shape.between)} {call(index + 1)}") for index in range(numbers))
    return Shape(start, f"{lark.text(open_)} {call(0)}", more, lark.text(close), ends=(close,))


def mistral_shape(lark: Lark, form: MistralCalls, family: str, tools: Sequence[ToolSchema]) -> Shape:
    if family == "mistral_v3":
        return json_shape(lark, JsonCalls(form.starts), family, tools)
    mark = form.starts[0]
    first = either([f"{lark.text(tool.name + '[ARGS]')} {whole_json(lark, tool)}" for tool in tools])
    return Shape(mark, first, (lark.rule(f"{lark.text(mark)} {first}"),) * MAX_CALLS)


def section_shape(lark: Lark, form: SectionCalls, family: str, tools: Sequence[ToolSchema]) -> Shape:
    known = lark.marks.known
    start, call, sep, end = known(form.section), known(form.call), known(form.separator), known(form.call_end)
    id_rule = f"/[a-z0-9]{{10}}/ {lark.text(form.id_separator)}" if form.id_separator else ""
    is_fenced = family in ("deepseek_v3", "deepseek_r1")
    is_numbered = family == "kimi_k2"

    def one(index: int) -> str:
        calls: list[str] = []
        for tool in tools:
            if is_fenced:
                head, close = lark.text(f"function{sep}{tool.name}\n```json\n"), lark.text("\n```" + end)
            else:
                head = lark.text((f"functions.{tool.name}:{index}" if is_numbered else tool.name) + sep)
                close = lark.text(end)
            calls.append(f"{id_rule} {head} {whole_json(lark, tool)} {close}")
        return f"{lark.text(call)} {either(calls)}"

    more = tuple(lark.rule(one(index + 1)) for index in range(MAX_NUMBERED_CALLS if is_numbered else MAX_CALLS))
    tail = known(form.section_end)
    return Shape(start, one(0), more, lark.text(tail), ends=(tail,))


def tagged_json_shape(lark: Lark, form: TaggedJson, tools: Sequence[ToolSchema]) -> Shape:
    start, end = form.starts[0], lark.text(form.ends[0])
    first = either([f"{lark.text(tool.name + '>')} {whole_json(lark, tool)} {end}" for tool in tools])
    return Shape(start, first, (lark.rule(f"{lark.text(start)} {first}"),) * MAX_CALLS)


def recipient_shape(lark: Lark, form: RecipientJson, tools: Sequence[ToolSchema]) -> Shape:
    first = either([f"{lark.text(tool.name + chr(10))} {whole_json(lark, tool)}" for tool in tools])
    return Shape(form.starts[0], first, (lark.rule(f"{lark.text(chr(10) + form.starts[0])} {first}"),) * MAX_CALLS)


def python_shape(lark: Lark, form: PythonCalls, family: str, tools: Sequence[ToolSchema]) -> Shape:
    start, end = lark.marks.known(form.starts), "" if form.bare else lark.marks.known(form.ends)
    # OLMo writes one call per line.
    is_lines = family == "olmo3_pythonic"
    open_, between, close = ("\n", "\n", "\n" + end) if is_lines else ("[", ", ", "]" + end)
    calls: list[str] = []
    for tool in tools:
        members = Values(lark, tool, PYTHON).members(lark.parameters(tool), tool.required, "{}=")
        calls.append(f'{lark.text(tool.name + "(")} {members} ")"')
    first = either(calls)
    more = (lark.rule(f"{lark.text(between)} {first}"),) * MAX_CALLS
    return Shape(start, f"{lark.text(open_)} {first}", more, lark.text(close), ends=(close,))


def gemma_shape(lark: Lark, form: GemmaCalls, tools: Sequence[ToolSchema]) -> Shape:
    start, end = form.starts[0], lark.text(form.ends[0])
    style = Style(delimiter=form.dialect.delimiter, space="")
    calls: list[str] = []
    for tool in tools:
        values = Values(lark, tool, style, (*form.starts, *form.ends))
        members = values.members(lark.parameters(tool), tool.required, "{}:")
        calls.append(f'{lark.text("call:" + tool.name + "{")} {members} "}}" {end}')
    first = either(calls)
    return Shape(start, first, (lark.rule(f"{lark.text(start)} {first}"),) * MAX_CALLS, value_ends=(style.delimiter,))
