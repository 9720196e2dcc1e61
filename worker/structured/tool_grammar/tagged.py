"""Grammars of calls whose parameters are text between tags."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from worker.output.parsers.minimax_m3 import MiniMaxM3Calls
from worker.output.parsers.schema import Parameters, Schema, mapping
from worker.output.parsers.xml_calls import XmlCalls
from worker.output.parsers.xml_notation import end_beginnings, spellings
from worker.structured.tool_grammar.formats import MAX_CALLS, MAX_NUMBERED_CALLS, Shape
from worker.structured.tool_grammar.lark import Lark, either
from worker.structured.tool_grammar.plain_text import PlainText
from worker.structured.tool_grammar.schemas import ToolSchema, constants, only, quantifier, resolved
from worker.structured.tool_grammar.values import JSON, Values


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
