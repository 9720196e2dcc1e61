"""Assembly of one grammar from a family, its tools and the requested calls.

Strict calls in formats without a marker: the rule begins after a call's head, which contains the tool's name.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

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
from worker.structured.tool_grammar import formats
from worker.structured.tool_grammar.lark import Lark, MarkupTokens, either
from worker.structured.tool_grammar.schemas import ToolSchema, anything, tool_of
from worker.structured.tool_grammar.values import PYTHON, Values, whole_json

# Pairs of separators in a JSON call: the first follows the key "name", the second separates the name from the next key.
_JSON_GAPS: Final = ((": ", ", "), (":", ","), (": ", ","), (": ", ",\n"), (": ", ",\n  "), (": ", ",\n    "))
# Texts that may stand between the function name and the body of a Harmony message.
_HARMONY_HEADERS: Final = (
    " <|constrain|>json", "<|constrain|>json", " json", "", " code",
    "<|channel|>commentary <|constrain|>json", "<|channel|>commentary json",
    "<|channel|>analysis <|constrain|>json", "<|channel|>analysis json",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CallHead:
    """Head of a call: `triggers` returns the ways to begin a call of a tool, `rest` the expression after the head."""

    triggers: Callable[[str], Sequence[str]]
    rest: Callable[[Lark, ToolSchema], str]


def _json_triggers(name: str) -> list[str]:
    keys = ("parameters", "arguments")
    return [f'"name"{colon}"{name}"{comma}"{key}":' for colon, comma in _JSON_GAPS for key in keys]


def _json_rest(lark: Lark, tool: ToolSchema) -> str:
    return f'" "? {whole_json(lark, tool)}'


def _python_rest(lark: Lark, tool: ToolSchema) -> str:
    return f'{Values(lark, tool, PYTHON).members(lark.parameters(tool), tool.required, "{}=")} ")"'


_JSON: Final = CallHead(_json_triggers, _json_rest)
_PYTHON: Final = CallHead(lambda name: [f"{before}{name}(" for before in ("[", ", ", ",", "[ ", "\n")], _python_rest)
HEADS: Final[dict[str, CallHead]] = {
    "functionary_v32": CallHead(lambda name: [f">>>{name}\n"], whole_json),
    "harmony": CallHead(
        lambda name: [f"to=functions.{name}{kind}<|message|>" for kind in _HARMONY_HEADERS], whole_json
    ),
    "llama3_json": _JSON,
    "llama4_pythonic": _PYTHON,
    "pythonic": _PYTHON,
    "xlam": _JSON,
}


@dataclass(frozen=True, slots=True)
class Calls:
    """Tools that may be called, in OpenAI's format. The tools in `loose_names` take any arguments."""

    tools: Sequence[Mapping[str, Any]]
    is_parallel: bool = True
    loose_names: tuple[str, ...] = ()

    def checked(self) -> list[ToolSchema]:
        tools = [tool_of(tool) for tool in self.tools]
        return [anything(tool) if tool.name in self.loose_names else tool for tool in tools]


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """Grammar of calls. `text` is Lark; `trigger` is the marker of a call if only calls are constrained; for the ends
    see `Shape`.

    The schemas of the tools in `unheld` are only partly enforced.
    """

    text: str
    value_ends: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    trigger: str = ""
    unheld: frozenset[str] = frozenset()


def has_calls(family: str) -> bool:
    """Return whether the family has a notation for calls."""
    grammar = FAMILIES[family].grammar
    return isinstance(grammar, Channels) or bool(grammar.formats or grammar.opening)


def call_grammar(family: str, calls: Calls, marks: MarkupTokens, prompt_end: str = "") -> CallGrammar:
    """Return the grammar of an answer that consists of calls, after any reasoning."""
    lark = Lark(marks)
    tools = calls.checked()
    grammar = FAMILIES[family].grammar
    if isinstance(grammar, Channels):
        return _message(lark, grammar, family, tools, calls.is_parallel)
    form = _format(family, marks)
    shape = _shape(lark, form, family, tools)
    start = "" if shape.start and prompt_end.rstrip().endswith(shape.start) else lark.text(shape.start)
    text = lark.source(f"{start} {_all(shape, calls.is_parallel, family)}")
    return CallGrammar(text, shape.value_ends, shape.ends, unheld=frozenset(lark.unheld))


def strict_grammar(family: str, calls: Calls, marks: MarkupTokens) -> CallGrammar | None:
    """Return the grammar of a call after its marker; None for a format without a marker."""
    lark, grammar = Lark(marks), FAMILIES[family].grammar
    form = grammar.body if isinstance(grammar, Channels) else _format(family, marks)
    if form is None or family in HEADS:
        return None
    shape = _shape(lark, form, family, calls.checked())
    if len(shape.start) < _TRIGGER_MIN_CHARS:
        return None
    text = lark.source(_all(shape, calls.is_parallel and bool(shape.tail), family))
    return CallGrammar(text, shape.value_ends, shape.ends, shape.start, frozenset(lark.unheld))


def rest_of_call(family: str, calls: Calls, marks: MarkupTokens) -> CallGrammar:
    """Return the grammar of the text after a call's head, for the only tool in `calls`, in a family of `HEADS`."""
    lark = Lark(marks)
    [tool] = calls.checked()
    return CallGrammar(lark.source(HEADS[family].rest(lark, tool)), unheld=frozenset(lark.unheld))


# Minimum length of a trigger, because shorter markers are ordinary punctuation.
_TRIGGER_MIN_CHARS: Final = 4


def _all(shape: formats.Shape, is_parallel: bool, family: str) -> str:
    more = list(shape.more) if is_parallel and family not in formats.SINGLE else []
    if len(set(more)) == 1:
        further = f"({more[0]}){{0,{len(more) - 1}}}"
    else:
        further = ""
        for expression in reversed(more):
            further = f"({expression} {further})?"
    return f"{shape.first} {further} {shape.tail}"


def _format(family: str, marks: MarkupTokens) -> CallFormat:
    """Return the format that the family writes; of several formats, the first whose control tokens are in the
    vocabulary.
    """
    grammar = FAMILIES[family].grammar
    assert not isinstance(grammar, Channels)
    if family == "pythonic" or not grammar.formats:
        assert grammar.opening is not None
        return grammar.opening
    # A family with several formats uses Llama's format for code, not for calls.
    usual = [form for form in grammar.formats if not isinstance(form, LlamaCalls)] or grammar.formats
    known = [form for form in usual if any(marks.has(start) for start in form.starts)]
    if not known and isinstance(grammar.opening, PythonCalls):
        return grammar.opening
    return known[0] if known else usual[0]


def _shape(lark: Lark, form: CallFormat, family: str, tools: Sequence[ToolSchema]) -> formats.Shape:
    match form:
        case JsonCalls():
            return formats.json_shape(lark, form, family, tools)
        case LlamaCalls():
            return formats.json_shape(lark, JsonCalls((), bare=True), "llama3_json", tools)
        case XmlCalls():
            return formats.xml_shape(lark, form, family, tools)
        case MistralCalls():
            return formats.mistral_shape(lark, form, family, tools)
        case SectionCalls():
            return formats.section_shape(lark, form, family, tools)
        case TaggedJson():
            return formats.tagged_json_shape(lark, form, tools)
        case RecipientJson():
            return formats.recipient_shape(lark, form, tools)
        case PythonCalls():
            return formats.python_shape(lark, form, family, tools)
        case GemmaCalls():
            return formats.gemma_shape(lark, form, tools)
        case MiniMaxM3Calls():
            return formats.minimax_m3_shape(lark, form, tools)
        case _:
            raise TypeError(f"no grammar for {type(form).__name__}")


def _message(
    lark: Lark, channels: Channels, family: str, tools: Sequence[ToolSchema], is_parallel: bool
) -> CallGrammar:
    """Return the grammar of a message to a tool, after an optional message of reasoning."""
    opening = next_message(family)
    value_ends: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    if isinstance(channels.body, XmlCalls):
        thought, calls = " to=self<|message|>", list[str]()
        for tool in tools:
            shape = formats.xml_shape(lark, channels.body, family, [tool])
            head = lark.text(f" to={tool.name}<|message|>{shape.start}")
            calls.append(f"{head} {_all(shape, is_parallel, family)}")
            value_ends, ends = shape.value_ends, shape.ends
    else:
        thought = "<|channel|>analysis<|message|>"
        header = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>"
        calls = [f"{lark.text(header.format(tool.name))} {whole_json(lark, tool)}" for tool in tools]
    if lark.marks.is_plain(opening):
        # The end of the reasoning cannot be distinguished from its text, because the markup after it has no control
        # tokens.
        return CallGrammar(lark.source(either(calls)), value_ends, ends, unheld=frozenset(lark.unheld))
    reasoning = f"({lark.text(thought)} {lark.ordinary()} {lark.text(opening)})?"
    text = lark.source(f"{reasoning} {either(calls)}")
    return CallGrammar(text, (opening, *value_ends), ends, unheld=frozenset(lark.unheld))


def next_message(family: str) -> str:
    """Return the text between a reasoning message and the next one; "" for a family whose output is not messages."""
    grammar = FAMILIES[family].grammar
    if not isinstance(grammar, Channels):
        return ""
    head, assistant, _ = grammar.reasoning_end.partition("assistant")
    return head + assistant
