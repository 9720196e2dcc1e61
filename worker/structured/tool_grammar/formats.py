"""Grammars of each format's tool calls, built from the format objects that `worker.output.parsers` uses.

Grammars of calls whose parameters are text between tags.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from worker.output.parsers.json_calls import JsonCalls, MistralCalls, RecipientJson, SectionCalls, TaggedJson
from worker.output.parsers.literal_calls import GemmaCalls, PythonCalls
from worker.output.parsers.schema import Parameters, Schema, mapping
from worker.output.parsers.xml_calls import MiniMaxM3Calls, XmlCalls
from worker.output.parsers.xml_notation import end_beginnings, spellings
from worker.structured.tool_grammar.lark import Lark, either
from worker.structured.tool_grammar.plain_text import PlainText
from worker.structured.tool_grammar.schemas import ToolSchema, constants, only, quantifier, resolved
from worker.structured.tool_grammar.values import JSON, PYTHON, Style, Values, whole_json

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


@dataclass(frozen=True, slots=True)
class XmlShape:
    """Text between a format's markers: `{name}`, `{key}`, `{index}`, `{type}` and `{is_string}` are placeholders.

    `head` follows the marker that ends the head, `value` opens a value, `after` follows each parameter, `end` a call.
    """

    name: str = "{name}"
    key: str = "{key}"
    wrap: str = "\n"
    head: str = "\n"
    value: str = ""
    before_end: str = ""
    after: str = "\n"
    end: str = "\n"
    is_numbered: bool = False


_ATTRIBUTES: Final = XmlShape(' name="{name}"', ' name="{key}"')
_TIGHT_ATTRIBUTES: Final = XmlShape(' name="{name}"', ' name="{key}"', wrap="", head="", after="", end="")
_DSML: Final = XmlShape(' name="{name}"', ' name="{key}" string="{is_string}"')
_GLM: Final = XmlShape(wrap="", end="")
_TIGHT: Final = XmlShape(wrap="", head="", after="", end="")
QWEN_SHAPE: Final = XmlShape(value="\n", before_end="\n")
XML_SHAPES: Final[dict[str, XmlShape]] = {
    "deepseek_v32": _DSML,
    "deepseek_v4": _DSML,
    "dots": XmlShape(' name="{name}"', ' name="{key}"', value="\n", before_end="\n"),
    "glm45": _GLM,
    "glm47": _TIGHT,
    "hy_v3": _TIGHT,
    "kimi_k3": XmlShape(
        ' tool="{name}" index="{index}"', ' key="{key}" type="{type}"', wrap="", head="", after="", end="",
        is_numbered=True,
    ),
    "ling3": _GLM,
    "longcat": _GLM,
    "minicpm5": _TIGHT_ATTRIBUTES,
    "minimax_m2": _ATTRIBUTES,
    "muse": _ATTRIBUTES,
    "nemotron_v3": QWEN_SHAPE,
    "qwen3_coder": QWEN_SHAPE,
    "qwen3_think": QWEN_SHAPE,
    "seed_oss": XmlShape(),
    "spark": _TIGHT,
    "step3": _TIGHT_ATTRIBUTES,
    "step3p5": QWEN_SHAPE,
}  # fmt: skip
# Families that use the second wrapper of their format.
SECOND_WRAP: Final = frozenset({"deepseek_v4"})


def xml_shape(lark: Lark, form: XmlCalls, family: str, tools: Sequence[ToolSchema]) -> Shape:
    return _XmlWriter(lark, form, XML_SHAPES.get(family, QWEN_SHAPE), family, tools).shape(tools)


class _XmlWriter:
    """Writer of the calls of one family."""

    def __init__(self, lark: Lark, form: XmlCalls, look: XmlShape, family: str, tools: Sequence[ToolSchema]) -> None:
        self._lark = lark
        self._form = form
        self._look = look
        at = 1 if family in SECOND_WRAP else 0
        self._wrap = form.wrap[at] if form.wrap else ""
        self._wrap_end = form.wrap_end[at] if form.wrap_end else ""
        keys = {key for tool in tools for key in tool.properties}
        self._texts = PlainText(lark, form, look.before_end + form.param_end + look.after, keys)

    def _banned(self, tool: ToolSchema, key: str) -> tuple[str, ...]:
        """Return the texts that no JSON value of `key` may contain, because the parser may not read them as its text:
        the end of a value, the start of a call, and the start of a parameter where another one may follow.
        """
        form = self._form
        further = () if _is_last(tool, key) else (form.param,)
        return (*spellings(form.param_end), *end_beginnings(form.param_end), *form.openers, *further)

    def shape(self, tools: Sequence[ToolSchema]) -> Shape:
        lark, form, look = self._lark, self._form, self._look
        values = self._texts.value_ends
        wrap_end = (look.end + self._wrap_end,) if self._wrap_end else ()
        ends = (*wrap_end, look.after + form.call_end, form.call_end, *self._texts.key_ends)
        numbers = MAX_NUMBERED_CALLS if look.is_numbered else MAX_CALLS
        if not form.call or not self._wrap:
            # The format has only one level of tags if it has no wrapper or no call marker.
            start = self._wrap or form.call
            one = self._call(tools, 0)
            return Shape(
                start, one, (lark.rule(f"{lark.text(chr(10) + start)} {one}"),) * numbers, value_ends=values, ends=ends
            )
        opening = lark.text(look.wrap + form.call)
        first = f"{opening} {self._call(tools, 0)}"
        if look == QWEN_SHAPE:
            # Qwen's format writes a wrapper around each call.
            one = f"{first} {lark.text(look.end + self._wrap_end)}"
            more = lark.rule(f"{lark.text(chr(10) + self._wrap)} {one}")
            return Shape(self._wrap, one, (more,) * numbers, value_ends=values, ends=ends)
        further = lark.text(look.end + form.call)
        more_calls = tuple(lark.rule(f"{further} {self._call(tools, index + 1)}") for index in range(numbers))
        return Shape(self._wrap, first, more_calls, lark.text(look.end + self._wrap_end), values, ends)

    def _call(self, tools: Sequence[ToolSchema], index: int) -> str:
        return either([self._one(tool, index) for tool in tools])

    def _one(self, tool: ToolSchema, index: int) -> str:
        """Return the expression of one call, without its start marker and up to its end."""
        lark, form, look = self._lark, self._form, self._look
        name = look.name.replace("{name}", tool.name).replace("{index}", str(index + 1))
        # The head ends at a line break or at the first parameter in some families.
        head_end = "" if form.head_end[0] == "\n" else form.head_end[0]
        params = [self._param(tool, key, schema) for key, schema in lark.parameters(tool).items()]
        return f"{lark.text(name + head_end + look.head)} {' '.join(params)} {lark.text(form.call_end)}"

    def _param(self, tool: ToolSchema, key: str, schema: Any) -> str:
        form, look = self._form, self._look
        kinds = Parameters(tool.parameters).types(key)
        kind = next(iter(sorted(kinds)), "string")
        is_text = not kinds or "string" in kinds
        label = look.key.replace("{type}", "number" if kind == "integer" else kind)
        label = label.replace("{is_string}", "true" if is_text else "false").replace("{key}", key)
        between = (look.after + form.value) if form.value else ""
        head = self._lark.text(form.param + label + form.key_end + between + look.value)
        end = look.before_end + form.param_end + look.after
        is_last = _is_last(tool, key)

        def text(body: str) -> str:
            return self._texts.value(body, is_last=is_last)

        value = parameter(self._lark, tool, key, schema, end, self._banned(tool, key), text)
        whole = self._lark.rule(f"{head} {value}")
        return whole if key in tool.required else f"({whole})?"


def _is_last(tool: ToolSchema, key: str) -> bool:
    """Return whether the call certainly has all other parameters before the one with this key."""
    keys = list(tool.properties)
    before = tool.required.intersection(keys[: keys.index(key)])
    return before >= tool.properties.keys() - {key}


def minimax_m3_shape(lark: Lark, form: MiniMaxM3Calls, tools: Sequence[ToolSchema]) -> Shape:
    """Return the shape of MiniMax M3's calls, with objects and lists as JSON; the parser also reads nested tags."""
    start, end = form.starts[0], form.ends[0]
    mark = start.removesuffix("<tool_call>")

    def call(tool: ToolSchema) -> str:
        params: list[str] = []
        for key, schema in lark.parameters(tool).items():
            open_, close = f"{mark}<{key}>", f"{mark}</{key}>"

            kinds = Parameters(tool.parameters).types(key)
            # A text may hold all tags but its own, which the parser counts. Other values may be nested tags.
            is_text = "string" in kinds and kinds.isdisjoint(("array", "object"))
            banned = open_ if is_text else mark

            def text(body: str, close: str = close, banned: str = banned) -> str:
                return lark.until(close, (banned,), body=body)

            value = parameter(lark, tool, key, schema, close, (mark,), text)
            whole = lark.rule(f"{lark.text(open_)} {value}")
            params.append(whole if key in tool.required else f"({whole})?")
        return f"{lark.text(f'<invoke name={chr(34)}{tool.name}{chr(34)}>')} {' '.join(params)}"

    close = lark.text(f"{mark}</invoke>\n")
    first = lark.rule(f"{lark.text(mark)} {either([call(tool) for tool in tools])} {close}")
    return Shape(start, f"{lark.text(chr(10))} {first}", (first,) * MAX_CALLS, lark.text(end), (f"{mark}</",), (end,))


def parameter(
    lark: Lark, tool: ToolSchema, key: str, schema: Any, end: str, banned: Sequence[str], text: Callable[[str], str]
) -> str:
    """Return the expression of a parameter's value and the `end` after it. Strings are plain text: `text` returns their
    expression for a regex. Other types are JSON without the `banned` texts.
    """
    options = _options(resolved(schema, tool.parameters))
    return either([_option(lark, tool, key, option, end, banned, text) for option in options or [schema]])


def _options(fields: Schema) -> list[Any]:
    """Return the alternatives of a value, one level deep."""
    for keyword in ("anyOf", "oneOf"):
        if isinstance(options := fields.get(keyword), list) and only(fields, keyword):
            return cast("list[Any]", options)
    return []


def _option(
    lark: Lark, tool: ToolSchema, key: str, schema: Any, end: str, banned: Sequence[str], text: Callable[[str], str]
) -> str:
    fields = resolved(schema, tool.parameters)
    if not ("$ref" not in mapping(schema) or only(schema, "$ref")) or schema is False:
        lark.unheld.add(tool.name)
    if "enum" in fields or "const" in fields:
        values = Values(lark, tool, JSON, banned)
        if not only(fields, "enum", "type") and not only(fields, "const", "type"):
            lark.unheld.add(tool.name)
        options = [lark.text(each) if isinstance(each, str) else values.value({"const": each})
                   for each in constants(fields)]  # fmt: skip
        return f"{either([option for option in options if option])} {lark.text(end)}"
    kinds = Parameters({"properties": {key: schema}}, tool.parameters).types(key)
    if kinds and "string" not in kinds:
        return f"{Values(lark, tool, JSON, banned).value(schema)} {lark.text(end)}"
    if not only(fields, "type", "minLength", "maxLength") and not only(fields, "type", "pattern"):
        lark.unheld.add(tool.name)
    return text(_body(fields))


def _body(schema: Schema) -> str:
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        left = "" if pattern.startswith("^") else "(?s:.*)"
        right = "" if pattern.endswith("$") else "(?s:.*)"
        return f"{left}({pattern.removeprefix('^').removesuffix('$')}){right}".replace("/", r"\/").replace("\n", "\\n")
    return f"(?s:.{quantifier(schema)})"
