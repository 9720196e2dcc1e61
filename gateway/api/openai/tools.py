"""Lowering of OpenAI's tools and tool choice, in the new and the legacy form, to one `ToolPolicy`."""

import re
from collections.abc import Sequence
from typing import Any, Final, cast

from msgspec import Struct

from gateway.api.common.canonical import FunctionTool, ToolMode, ToolPolicy, sendable
from gateway.api.common.decode import converted
from gateway.api.openai.request import TOOL_MODES, ChatCompletionRequest, FunctionSpec, ToolSpec
from gateway.errors import BadRequest, Unsupported, invalid_choice, missing_parameter

# Longer names and more characters than OpenAI's are accepted, because gateways to other servers put paths into names.
_NAME: Final = re.compile(r"[\w.\-:/@$]{1,128}")


class _FunctionName(Struct, frozen=True):
    name: str


class _AllowedTools(Struct, frozen=True):
    mode: str = "auto"
    tools: list[dict[str, Any]] = []


class _ChoiceSpec(Struct, frozen=True):
    """`{"type": "function", "function": {"name": …}}`, `allowed_tools`, both without the inner object, or a mode."""

    type: str
    function: _FunctionName | None = None
    name: str | None = None
    allowed_tools: _AllowedTools | None = None
    mode: str = "auto"
    tools: list[dict[str, Any]] | None = None


def lower_tools(request: ChatCompletionRequest) -> ToolPolicy:
    """Lower tools and the tool choice. Raises `BadRequest`."""
    if request.functions:
        if request.tools:
            raise BadRequest("'functions' and 'tools' exclude each other.", "functions", "invalid_value")
        return _legacy(request.functions, request.function_call)
    if request.function_call not in (None, "none", "auto"):
        raise BadRequest("'function_call' needs 'functions'.", "function_call", "invalid_value")
    tools = [lower_tool(spec, f"tools[{index}]") for index, spec in enumerate(request.tools or ())]
    use = _choose(tools, request.tool_choice, request.parallel_tool_calls is not False)
    return use.check("tool_choice")


def _legacy(functions: Sequence[FunctionSpec], call: Any) -> ToolPolicy:
    """Lower legacy functions. With them, an answer has at most one call."""
    tools = tuple(_function(spec, f"functions[{index}]") for index, spec in enumerate(functions))
    if isinstance(call, dict):
        name = converted(call, _FunctionName, "function_call").name
        return ToolPolicy(tools, ToolMode.NAMED, name, is_parallel=False).check("function_call")
    if call not in (None, "none", "auto"):
        raise BadRequest(f"Invalid value for 'function_call': {_shown(call)}.", "function_call", "invalid_value")
    return ToolPolicy(tools, TOOL_MODES[call or "auto"], is_parallel=False).check("functions")


def lower_tool(spec: ToolSpec, where: str) -> FunctionTool:
    """Lower a function that the model may call. Raises `BadRequest`."""
    if spec.type != "function":
        raise Unsupported(f"Tools of type {spec.type!r} are not supported on this endpoint.", f"{where}.type")
    if spec.function is None:
        raise missing_parameter(f"{where}.function")
    return _function(spec.function, f"{where}.function")


def _function(spec: FunctionSpec, where: str) -> FunctionTool:
    if not _NAME.fullmatch(spec.name):
        message = f"Invalid value for '{where}.name': expected letters, digits, '_' and '-', at most 128."
        raise BadRequest(message, f"{where}.name", "invalid_value")
    parameters = sendable(spec.parameters or {}, f"{where}.parameters")
    return FunctionTool(spec.name, spec.description or "", parameters, bool(spec.strict))


def _choose(tools: list[FunctionTool], choice: Any, is_parallel: bool) -> ToolPolicy:
    if choice is None or isinstance(choice, str):
        return ToolPolicy(tuple(tools), _mode(choice or "auto", "tool_choice"), is_parallel=is_parallel)
    if not isinstance(choice, dict):
        raise BadRequest(f"Invalid value for 'tool_choice': {_shown(choice)}.", "tool_choice", "invalid_value")
    spec = converted(cast("dict[str, Any]", choice), _ChoiceSpec, "tool_choice")
    match spec.type:
        case mode if mode in TOOL_MODES:
            return ToolPolicy(tuple(tools), TOOL_MODES[mode], is_parallel=is_parallel)
        case "function":
            name = spec.function.name if spec.function is not None else spec.name
            if name is None:
                raise missing_parameter("tool_choice.function")
            return ToolPolicy(tuple(tools), ToolMode.NAMED, name, is_parallel)
        case "allowed_tools":
            allowed = spec.allowed_tools
            if allowed is None:
                if spec.tools is None:
                    raise missing_parameter("tool_choice.allowed_tools")
                allowed = _AllowedTools(spec.mode, spec.tools)
            return _allow(tools, allowed, is_parallel)
        case kind:
            raise invalid_choice(kind, (*TOOL_MODES, "function", "allowed_tools"), "tool_choice.type")


def _allow(tools: list[FunctionTool], allowed: _AllowedTools, is_parallel: bool) -> ToolPolicy:
    """Return a policy that shows only the allowed tools to the model."""
    where = "tool_choice.allowed_tools"
    names: set[str] = set()
    for index, raw in enumerate(allowed.tools):
        spec = converted(raw, _ChoiceSpec, f"{where}.tools[{index}]")
        names.add(spec.function.name if spec.function is not None else spec.name or "")
    if unknown := names - {tool.name for tool in tools}:
        raise BadRequest(f"There is no tool named {min(unknown)[:100]!r}.", f"{where}.tools", "invalid_value")
    kept = tuple(tool for tool in tools if tool.name in names)
    return ToolPolicy(kept, _mode(allowed.mode, f"{where}.mode"), is_parallel=is_parallel)


def _mode(word: str, param: str) -> ToolMode:
    if word not in TOOL_MODES:
        raise invalid_choice(word, TOOL_MODES, param)
    return TOOL_MODES[word]


def _shown(value: Any) -> str:
    return repr(value)[:60]
