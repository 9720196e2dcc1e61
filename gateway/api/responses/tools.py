"""Tools of a Responses request: as the prompt offers them, and as their calls are returned to the client."""

from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from msgspec import Struct

from gateway.api.common.canonical import FunctionTool, ToolMode, ToolPolicy, sendable
from gateway.api.responses.request import InputTokensRequest
from gateway.errors import BadRequest

# Between a namespace and the name of a function in it: names may hold letters, digits, `_` and `-` only.
SEPARATOR: Final = "__"
# A custom tool is shown as a function with this one string.
INPUT: Final = "input"
# Run by OpenAI's servers, or known to its models only: left out, and named in `x-mlxd-ignored`.
FOREIGN: Final = frozenset(
    {
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
        "file_search",
        "computer",
        "computer_use_preview",
        "mcp",
        "image_generation",
        "code_interpreter",
        "local_shell",
        "shell",
        "apply_patch",
        "tool_search",
        "programmatic_tool_calling",
    }
)
_CHOICES: Final = {"auto": ToolMode.AUTO, "none": ToolMode.NONE, "required": ToolMode.REQUIRED}


class InputGrammar(Struct, frozen=True):
    """Format of a custom tool's input: described to the model, not enforced."""

    type: str = "text"
    syntax: str = ""
    definition: str = ""


class ResponseTool(Struct, frozen=True):
    """A tool of any type."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: InputGrammar | None = None
    tools: list["ResponseTool"] | None = None


class ChoiceSpec(Struct, frozen=True):
    """A `tool_choice` that is an object."""

    type: str
    name: str = ""
    namespace: str | None = None
    mode: str = "auto"
    tools: list["ChoiceSpec"] | None = None


@dataclass(frozen=True, slots=True)
class ToolIdentity:
    """A tool's identity for the client."""

    name: str
    namespace: str = ""
    is_custom: bool = False


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools of one request: as the model sees them, by name as the client knows them, and as they are echoed."""

    use: ToolPolicy
    forms: dict[str, ToolIdentity]
    echo: list[dict[str, Any]]
    ignored: list[str]


@dataclass(slots=True)
class _Collected:
    tools: list[FunctionTool] = field(default_factory=list[FunctionTool])
    forms: dict[str, ToolIdentity] = field(default_factory=dict[str, ToolIdentity])
    ignored: list[str] = field(default_factory=list[str])


def toolbox(request: InputTokensRequest) -> Toolbox:
    """Raises `BadRequest`."""
    collected = _Collected()
    echo: list[dict[str, Any]] = []
    for index, raw in enumerate(request.tools or ()):
        where = f"tools[{index}]"
        spec = _convert(raw, ResponseTool, where)
        _collect(spec, "", where, collected)
        echo.append(
            {"description": None, "parameters": None, **raw, "strict": bool(spec.strict)}
            if spec.type == "function"
            else raw
        )
    use = _use(request, collected)
    return Toolbox(use.check("tool_choice"), collected.forms, echo, collected.ignored)


def flat_name(name: str, namespace: str | None) -> str:
    """The name under which the model knows a function."""
    return f"{namespace}{SEPARATOR}{name}" if namespace else name


def _collect(spec: ResponseTool, namespace: str, where: str, found: _Collected) -> None:
    match spec.type:
        case "function" | "custom":
            if not spec.name:
                raise BadRequest(f"Missing required parameter: '{where}.name'.", f"{where}.name")
            tool = _function(spec, namespace, where) if spec.type == "function" else _custom(spec, namespace)
            found.tools.append(tool)
            if spec.type == "custom" and spec.format is not None and spec.format.definition:
                found.ignored.append("tools.custom.format")
            found.forms[tool.name] = ToolIdentity(spec.name, namespace, spec.type == "custom")
        case "namespace" if not namespace:
            for index, inner in enumerate(spec.tools or ()):
                _collect(inner, spec.name, f"{where}.tools[{index}]", found)
        case kind if kind in FOREIGN:
            found.ignored.append(f"tools.{kind}")
        case kind:
            message = f"Invalid value for '{where}.type': {kind[:50]!r} is not a type of tool."
            raise BadRequest(message, f"{where}.type", "invalid_value")


def _function(spec: ResponseTool, namespace: str, where: str) -> FunctionTool:
    parameters = sendable(spec.parameters or {}, f"{where}.parameters")
    return FunctionTool(flat_name(spec.name, namespace), spec.description or "", parameters, bool(spec.strict))


def _custom(spec: ResponseTool, namespace: str) -> FunctionTool:
    """Free-form text as the one string of a function; a grammar is told in the description."""
    description = spec.description or ""
    if spec.format is not None and spec.format.definition:
        grammar = f"The {INPUT} must match this {spec.format.syntax or 'lark'} grammar:\n{spec.format.definition}"
        description = f"{description}\n\n{grammar}" if description else grammar
    value = {"type": "string", "description": "The whole input of the tool, as plain text."}
    parameters = {"type": "object", "properties": {INPUT: value}, "required": [INPUT], "additionalProperties": False}
    return FunctionTool(flat_name(spec.name, namespace), description, parameters, False)


# -- the choice among them -------------------------------------------------------------------------------------------


def _use(request: InputTokensRequest, found: _Collected) -> ToolPolicy:
    tools, is_parallel = tuple(found.tools), request.parallel_tool_calls is not False
    choice = request.tool_choice
    if choice is None or isinstance(choice, str):
        return ToolPolicy(tools, _mode(choice or "auto", "tool_choice"), is_parallel=is_parallel)
    spec = _convert(choice, ChoiceSpec, "tool_choice")
    match spec.type:
        case "function" | "custom":
            return ToolPolicy(tools, ToolMode.NAMED, flat_name(spec.name, spec.namespace), is_parallel)
        case "allowed_tools":
            allowed = {flat_name(one.name, one.namespace) for one in spec.tools or ()}
            kept = tuple(tool for tool in tools if tool.name in allowed)
            return ToolPolicy(kept, _mode(spec.mode, "tool_choice.mode"), is_parallel=is_parallel)
        case kind:
            raise BadRequest(f"A tool of type {kind[:50]!r} cannot be called here.", "tool_choice", "invalid_value")


def _mode(word: str, param: str) -> ToolMode:
    if word not in _CHOICES:
        raise BadRequest(f"Invalid value for '{param}': {word[:40]!r}.", param, "invalid_value")
    return _CHOICES[word]


def _convert(raw: dict[str, Any], struct: type[Any], where: str) -> Any:
    try:
        return msgspec.convert(raw, struct)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$")
        param = where + path.rstrip("`")
        raise BadRequest(f"Invalid value for '{param}': {what}.", param, "invalid_value") from None
