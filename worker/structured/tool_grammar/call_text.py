"""Text of calls in the notation of a family, as its parser reads it: for chats whose template writes no calls."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from worker.output.parsers.call import CallFormat
from worker.output.parsers.channels import Channels
from worker.output.parsers.families import FAMILIES
from worker.output.parsers.json_calls import (
    JsonCalls,
    LlamaCalls,
    MistralCalls,
    RecipientJson,
    SectionCalls,
    TaggedJson,
)
from worker.output.parsers.literal_calls import GemmaCalls, PythonCalls
from worker.output.parsers.xml_calls import MiniMaxM3Calls, XmlCalls
from worker.output.parsers.xml_notation import CDATA
from worker.structured.tool_grammar.formats import JSON_SHAPES, QWEN_SHAPE, SECOND_WRAP, XML_SHAPES, JsonShape, XmlShape

_KEYWORD: Final = re.compile(r"[^\W\d]\w*")
_PLAIN_KEY: Final = re.compile(r"[\w.\-]+")
_PYTHON_WORDS: Final = {None: "None", True: "True", False: "False"}
# Families whose first start marker has no end marker; their end markers belong to other ones.
_WITHOUT_END: Final = frozenset({"gigachat", "granite", "granite3", "granite_thinking", "phi4mini", "xlam"})
_TYPES: Final[dict[type, str]] = {
    str: "string", bool: "boolean", int: "number", float: "number", list: "array", dict: "object", type(None): "null",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A call to write. Formats that write an id or number the calls use `call_id` and `index`."""

    name: str
    arguments: Mapping[str, Any]
    index: int = 0
    call_id: str = ""


def call_text(family: str, calls: Sequence[WrittenCall]) -> str:
    """Return the text of the calls of one turn in the family's notation."""
    grammar = FAMILIES[family].grammar
    if isinstance(grammar, Channels):
        return _messages(family, grammar, calls)
    if family == "pythonic" or not grammar.formats:
        assert grammar.opening is not None, "of a family with calls"
        return _text(family, grammar.opening, calls)
    # A family with several formats uses Llama's format for code, not for calls.
    form = next((form for form in grammar.formats if not isinstance(form, LlamaCalls)), grammar.formats[0])
    return _text(family, form, calls)


def _text(family: str, form: CallFormat, calls: Sequence[WrittenCall]) -> str:
    match form:
        case JsonCalls() | MistralCalls() if family != "mistral":
            return _json_calls(family, form, calls)
        case MistralCalls():
            return "".join(f"{form.starts[0]}{call.name}[ARGS]{_json(call.arguments)}" for call in calls)
        case LlamaCalls():
            return _json_calls("llama3_json", JsonCalls((), bare=True), calls)
        case XmlCalls():
            return _xml_calls(family, form, calls)
        case SectionCalls():
            each = "".join(_section_call(family, form, call) for call in calls)
            return form.section[0] + each + form.section_end[0]
        case TaggedJson():
            return "".join(f"{form.starts[0]}{call.name}>{_json(call.arguments)}{form.ends[0]}" for call in calls)
        case RecipientJson():
            return "\n".join(f"{form.starts[0]}{call.name}\n{_json(call.arguments)}" for call in calls)
        case PythonCalls():
            return _python_calls(family, form, calls)
        case GemmaCalls():
            delimiter, start, end = form.dialect.delimiter, form.starts[0], form.ends[0]
            return "".join(f"{start}call:{call.name}{_gemma(call.arguments, delimiter)}{end}" for call in calls)
        case MiniMaxM3Calls():
            return _minimax_m3_calls(form, calls)
        case _:
            raise TypeError(f"no notation of {type(form).__name__}")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _json_calls(family: str, form: CallFormat, calls: Sequence[WrittenCall]) -> str:
    shape = JSON_SHAPES.get(family, JsonShape())
    is_keyed = isinstance(form, JsonCalls) and form.keyed
    start = "" if isinstance(form, JsonCalls) and form.bare else form.starts[0]
    end = form.ends[0] if form.ends and family not in _WITHOUT_END else ""
    objects: list[str] = []
    for call in calls:
        before = shape.before.replace("{index}", str(call.index))
        fields = f'{before}"{shape.name}": {_json(call.name)}, "{shape.arguments}": {_json(call.arguments)}'
        objects.append(f"{{{_json(call.name)}: {_json(call.arguments)}}}" if is_keyed else f"{{{fields}}}")
    if shape.many == "each":
        return shape.between.join(start + shape.gap + each + shape.gap + end for each in objects)
    all_of_them = shape.between.join(objects)
    if shape.many == "list":
        # The start marker of one format includes the bracket.
        all_of_them = ("" if start.endswith("[") else "[") + all_of_them + "]"
    return start + shape.gap + all_of_them + shape.gap + end


def _section_call(family: str, form: SectionCalls, call: WrittenCall) -> str:
    start, separator, end, arguments = form.call[0], form.separator[0], form.call_end[0], _json(call.arguments)
    if family in ("deepseek_v3", "deepseek_r1"):
        return f"{start}function{separator}{call.name}\n```json\n{arguments}\n```{end}"
    if form.id_separator:
        return f"{start}{call.call_id}{form.id_separator}{call.name}{separator}{arguments}{end}"
    header = f"functions.{call.name}:{call.index}" if family == "kimi_k2" else call.name
    return f"{start}{header}{separator}{arguments}{end}"


def _xml_calls(family: str, form: XmlCalls, calls: Sequence[WrittenCall]) -> str:
    look, at = XML_SHAPES.get(family, QWEN_SHAPE), int(family in SECOND_WRAP)
    wrap = form.wrap[at] if form.wrap else ""
    wrap_end = form.wrap_end[at] if form.wrap_end else ""
    bodies = [_xml_call(form, look, call, at + 1) for at, call in enumerate(calls)]
    if look == QWEN_SHAPE or not wrap or not form.call:
        opening = wrap + (look.wrap if wrap and form.call else "")
        closing = look.end + wrap_end if wrap_end else ""
        return "\n".join(opening + body + closing for body in bodies)
    return wrap + look.wrap + look.end.join(bodies) + look.end + wrap_end


def _xml_call(form: XmlCalls, look: XmlShape, call: WrittenCall, number: int) -> str:
    name = look.name.replace("{index}", str(number)).replace("{name}", call.name)
    # The head ends at a line break or at the first parameter in some families.
    head_end = "" if form.head_end[0] == "\n" else form.head_end[0]
    params: list[str] = []
    for key, value in call.arguments.items():
        label = look.key.replace("{type}", _TYPES[type(value)])
        label = label.replace("{is_string}", "true" if isinstance(value, str) else "false").replace("{key}", key)
        text = value if isinstance(value, str) else _json(value)
        if form.cdata and ("<" in text or "&" in text) and "]]>" not in text:
            text = f"{CDATA}{text}]]>"
        between = look.after + form.value if form.value else ""
        head = form.param + label + form.key_end + between + look.value
        params.append(head + text + look.before_end + form.param_end + look.after)
    return form.call + name + head_end + look.head + "".join(params) + form.call_end


def _python_calls(family: str, form: PythonCalls, calls: Sequence[WrittenCall]) -> str:
    start, end = ("", "") if form.bare else (form.starts[0], form.ends[0])
    if not all(_KEYWORD.fullmatch(key) for call in calls for key in call.arguments):
        # These are no names of Python. Models also write JSON here.
        objects = ({"name": call.name, "arguments": call.arguments} for call in calls)
        return start + "[" + ", ".join(map(_json, objects)) + "]" + end
    texts = [
        f"{call.name}({', '.join(f'{key}={_python(value)}' for key, value in call.arguments.items())})"
        for call in calls
    ]
    # OLMo writes one call per line.
    is_lines = family == "olmo3_pythonic"
    return start + ("\n" + "\n".join(texts) + "\n" if is_lines else "[" + ", ".join(texts) + "]") + end


def _python(value: Any) -> str:
    match value:
        case None | bool():
            return _PYTHON_WORDS[value]
        case list():
            return "[" + ", ".join(map(_python, cast("list[Any]", value))) + "]"
        case dict():
            members = cast("dict[str, Any]", value).items()
            return "{" + ", ".join(f"{_json(key)}: {_python(member)}" for key, member in members) + "}"
        case _:
            return _json(value)


def _gemma(value: Any, delimiter: str) -> str:
    match value:
        case str():
            return delimiter + value + delimiter
        case list():
            return "[" + ",".join(_gemma(each, delimiter) for each in cast("list[Any]", value)) + "]"
        case Mapping():
            members = cast("Mapping[str, Any]", value).items()
            keys = (key if _PLAIN_KEY.fullmatch(key) else _gemma(key, delimiter) for key, _ in members)
            values = (_gemma(member, delimiter) for _, member in members)
            return "{" + ",".join(f"{key}:{member}" for key, member in zip(keys, values, strict=True)) + "}"
        case _:
            return _json(value)


def _minimax_m3_calls(form: MiniMaxM3Calls, calls: Sequence[WrittenCall]) -> str:
    mark = form.starts[0].removesuffix("<tool_call>")
    texts: list[str] = []
    for call in calls:
        params = "".join(
            f"{mark}<{key}>{value if isinstance(value, str) else _json(value)}{mark}</{key}>"
            for key, value in call.arguments.items()
        )
        # Other keys are no tags.
        is_plain = all(_PLAIN_KEY.fullmatch(key) for key in call.arguments)
        body = params if is_plain else _json(call.arguments)
        texts.append(f'{mark}<invoke name="{call.name}">{body}{mark}</invoke>\n')
    return form.starts[0] + "\n" + "".join(texts) + form.ends[0]


def _messages(family: str, grammar: Channels, calls: Sequence[WrittenCall]) -> str:
    """Return a message for each call, without the marker that begins the first."""
    if grammar.body is not None:
        texts = [f" to={call.name}<|message|>{_text(family, grammar.body, [call])}" for call in calls]
    else:
        header = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}"
        texts = [header.format(call.name, _json(call.arguments)) for call in calls]
    return f"{grammar.ends[0 if grammar.body else 1]}<|start|>assistant".join(texts)
