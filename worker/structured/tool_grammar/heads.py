"""Strict calls in formats without a marker: the rule begins after a call's head, which contains the tool's name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from worker.structured.tool_grammar.lark import Lark
from worker.structured.tool_grammar.schemas import ToolSchema
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
