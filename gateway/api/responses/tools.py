"""Tools of a Responses request, as the prompt shows them and as the client names them."""

from dataclasses import dataclass
from typing import Any, Final

from msgspec import Struct

from gateway.api.common.canonical import FunctionTool, ToolMode, ToolPolicy, sendable
from gateway.api.common.decode import converted
from gateway.api.responses.request import InputTokensRequest
from gateway.errors import BadRequest, missing_parameter

# Separates a namespace from the name of a function in it. Names contain only letters, digits, `_` and `-`.
NAMESPACE_SEPARATOR: Final = "__"
# A function with one string parameter of this name represents a custom tool.
INPUT: Final = "input"
# These tools run on OpenAI's servers, or only OpenAI's models know them. They are left out and reported in
# `x-mlxd-ignored`.
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
    """Format of a custom tool's input. The prompt describes it; nothing enforces it."""

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


class NamedTool(Struct, frozen=True):
    """The object in which Chat Completions names a tool."""

    name: str


class AllowedTools(Struct, frozen=True):
    """The object in which Chat Completions lists the allowed tools."""

    mode: str = "auto"
    tools: list["ChoiceSpec"] | None = None


class ChoiceSpec(Struct, frozen=True):
    """A `tool_choice` that is an object, or a tool in it; also with the inner object of Chat Completions."""

    type: str
    name: str = ""
    namespace: str | None = None
    mode: str = "auto"
    tools: list["ChoiceSpec"] | None = None
    function: NamedTool | None = None
    custom: NamedTool | None = None
    allowed_tools: AllowedTools | None = None

    def tool(self, where: str) -> str:
        """Return the name under which the model knows this tool. Raises `BadRequest`."""
        inner = self.function or self.custom
        name = self.name or (inner.name if inner is not None else "")
        if not name:
            raise missing_parameter(f"{where}.name")
        return flat_name(name, self.namespace)


@dataclass(frozen=True, slots=True)
class ToolIdentity:
    """Namespace and name by which the client knows a tool."""

    name: str
    namespace: str = ""
    is_custom: bool = False


@dataclass(slots=True)
class Toolbox:
    """Tools of one request: those in the prompt, a map from the model's names to the client's, the tools to repeat in
    the response, and the names of ignored tools.
    """

    policy: ToolPolicy
    forms: dict[str, ToolIdentity]
    echo: list[dict[str, Any]]
    ignored: list[str]


def toolbox(request: InputTokensRequest) -> Toolbox:
    """Lower the tools of a request. Raises `BadRequest`."""
    tools: list[FunctionTool] = []
    box = Toolbox(ToolPolicy(), {}, [], [])
    for index, raw in enumerate(request.tools or ()):
        where = f"tools[{index}]"
        spec = converted(raw, ResponseTool, where)
        _collect(spec, "", where, tools, box)
        box.echo.append(
            {"description": None, "parameters": None, **raw, "strict": bool(spec.strict)}
            if spec.type == "function"
            else raw
        )
    box.policy = _policy(request, tuple(tools)).check("tool_choice")
    return box


def plain_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any]:
    """Return a tool choice. One that is an object with a mode as its type is that mode, as some clients send it, and
    `any` is the name of `required` in other dialects.
    """
    match choice:
        case None:
            return "auto"
        case "any" | {"type": "any"}:
            return "required"
        case {"type": str(mode)} if mode in _CHOICES:
            return mode
        case _:
            return choice


def flat_name(name: str, namespace: str | None) -> str:
    """Return the name under which the model knows a function."""
    return f"{namespace}{NAMESPACE_SEPARATOR}{name}" if namespace else name


def _collect(spec: ResponseTool, namespace: str, where: str, tools: list[FunctionTool], box: Toolbox) -> None:
    """Add a tool, or the tools of a namespace, to `tools` and `box`."""
    match spec.type:
        case "function" | "custom":
            if not spec.name:
                raise missing_parameter(f"{where}.name")
            tool = _function(spec, namespace, where) if spec.type == "function" else _custom(spec, namespace)
            tools.append(tool)
            if spec.type == "custom" and spec.format is not None and spec.format.definition:
                box.ignored.append("tools.custom.format")
            box.forms[tool.name] = ToolIdentity(spec.name, namespace, spec.type == "custom")
        case "namespace" if not namespace:
            for index, inner in enumerate(spec.tools or ()):
                _collect(inner, spec.name, f"{where}.tools[{index}]", tools, box)
        case kind if kind in FOREIGN:
            box.ignored.append(f"tools.{kind}")
        case kind:
            message = f"Invalid value for '{where}.type': {kind[:50]!r} is not a type of tool."
            raise BadRequest(message, f"{where}.type", "invalid_value")


def _function(spec: ResponseTool, namespace: str, where: str) -> FunctionTool:
    parameters = sendable(spec.parameters or {}, f"{where}.parameters")
    return FunctionTool(flat_name(spec.name, namespace), spec.description or "", parameters, bool(spec.strict))


def _custom(spec: ResponseTool, namespace: str) -> FunctionTool:
    """Return a function with one parameter, the free-form text. Its description contains the grammar."""
    description = spec.description or ""
    if spec.format is not None and spec.format.definition:
        grammar = f"The {INPUT} must match this {spec.format.syntax or 'lark'} grammar:\n{spec.format.definition}"
        description = f"{description}\n\n{grammar}" if description else grammar
    value = {"type": "string", "description": "The whole input of the tool, as plain text."}
    parameters = {"type": "object", "properties": {INPUT: value}, "required": [INPUT], "additionalProperties": False}
    return FunctionTool(flat_name(spec.name, namespace), description, parameters, False)


def _policy(request: InputTokensRequest, tools: tuple[FunctionTool, ...]) -> ToolPolicy:
    is_parallel = request.parallel_tool_calls is not False
    choice = plain_choice(request.tool_choice)
    if isinstance(choice, str):
        return ToolPolicy(tools, _mode(choice, "tool_choice"), is_parallel=is_parallel)
    spec = converted(choice, ChoiceSpec, "tool_choice")
    match spec.type:
        case "function" | "custom":
            return ToolPolicy(tools, ToolMode.NAMED, spec.tool("tool_choice"), is_parallel)
        case "allowed_tools":
            return _allow(tools, spec.allowed_tools or AllowedTools(spec.mode, spec.tools), is_parallel)
        case kind:
            raise BadRequest(f"A tool of type {kind[:50]!r} cannot be called here.", "tool_choice", "invalid_value")


def _allow(tools: tuple[FunctionTool, ...], allowed: AllowedTools, is_parallel: bool) -> ToolPolicy:
    """Return a policy that shows only the allowed tools to the model; tools that are left out stay left out."""
    where = "tool_choice.tools"
    if allowed.tools is None:
        raise missing_parameter(where)
    listed = [(index, tool) for index, tool in enumerate(allowed.tools) if tool.type not in FOREIGN]
    names = {tool.tool(f"{where}[{index}]") for index, tool in listed}
    if unknown := names - {tool.name for tool in tools}:
        raise BadRequest(f"There is no tool named {min(unknown)[:100]!r}.", where, "invalid_value")
    kept = tuple(tool for tool in tools if tool.name in names)
    return ToolPolicy(kept, _mode(allowed.mode, "tool_choice.mode"), is_parallel=is_parallel)


def _mode(word: str, param: str) -> ToolMode:
    if word not in _CHOICES:
        raise BadRequest(f"Invalid value for '{param}': {word[:40]!r}.", param, "invalid_value")
    return _CHOICES[word]
