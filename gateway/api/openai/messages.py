"""Lowering of OpenAI's messages, as all versions of the API spell them, to the turns that chat templates expect."""

from collections.abc import Sequence
from typing import Any

from gateway.api.common import canonical
from gateway.api.common.canonical import Call, Content, arguments_text, named_results
from gateway.api.openai.media_parts import MEDIA_PARTS, NO_OPTIONS, MediaOptions, file_part, media_part
from gateway.api.openai.message_part import TEXT_PARTS, MessagePart
from gateway.api.openai.request import ROLES, CallSpec, RequestMessage
from gateway.errors import BadRequest, Unsupported, invalid_choice, missing_parameter


def turns(messages: Sequence[RequestMessage], options: MediaOptions = NO_OPTIONS) -> list[dict[str, Any]]:
    """Lower a conversation.

    Each tool result gets the name of the called tool. `options` apply to all media. Raises `BadRequest`.
    """
    # Legacy function calls have no ids. Each call gets one here, and so does its result.
    legacy: dict[str, str] = {}
    return named_results(
        [_turn(message, f"messages[{index}]", legacy, options) for index, message in enumerate(messages)]
    )


def _turn(message: RequestMessage, where: str, legacy: dict[str, str], options: MediaOptions) -> dict[str, Any]:
    if message.role not in ROLES:
        raise invalid_choice(message.role, ROLES, f"{where}.role")
    if message.audio is not None:
        raise Unsupported("Audio is not supported.", f"{where}.audio")
    if message.role == "assistant":
        return _assistant(message, where, legacy)
    if message.tool_calls or message.function_call:
        raise BadRequest("Only the assistant calls tools.", f"{where}.tool_calls", "invalid_value")
    if message.role == "tool":
        if message.tool_call_id is None:
            raise missing_parameter(f"{where}.tool_call_id")
        content = _content(message.content, where, options)
        return canonical.tool_result(message.tool_call_id, message.name or "", content)
    if message.role == "function":
        if message.name is None:
            raise missing_parameter(f"{where}.name")
        call_id = legacy.get(message.name, f"call_{message.name}")
        return canonical.tool_result(call_id, message.name, _content(message.content, where, options))
    if message.content is None:
        raise missing_parameter(f"{where}.content")
    content = _content(message.content, where, options)
    is_user = message.role == "user"
    # Templates expect the role "system", which OpenAI now calls "developer".
    turn = canonical.user(content) if is_user else canonical.system(canonical.only_text(content, where))
    return turn if message.name is None else {**turn, "name": message.name}


def _assistant(message: RequestMessage, where: str, legacy: dict[str, str]) -> dict[str, Any]:
    reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    calls = [_call(spec, f"{where}.tool_calls[{at}]") for at, spec in enumerate(message.tool_calls or ())]
    if message.function_call is not None:
        function = message.function_call
        legacy[function.name] = f"call_{len(legacy)}_{function.name}"
        calls.append(Call(legacy[function.name], function.name, arguments_text(function.arguments)))
    text = canonical.only_text(_content(message.content, where, NO_OPTIONS), where)
    # An answer that refuses has its text in `refusal`, beside an empty content.
    turn = canonical.assistant("\n".join(filter(None, (text, message.refusal))), calls, reasoning)
    return turn if message.name is None else {**turn, "name": message.name}


def _call(spec: CallSpec, where: str) -> Call:
    if spec.type != "function":
        raise Unsupported(f"Calls of type {spec.type!r} are not supported on this endpoint.", f"{where}.type")
    if spec.function is None:
        raise missing_parameter(f"{where}.function")
    return Call(spec.id, spec.function.name, arguments_text(spec.function.arguments))


def _content(content: str | list[MessagePart] | None, where: str, options: MediaOptions) -> Content:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = (_part(part, f"{where}.content[{index}]", options) for index, part in enumerate(content))
    return canonical.content(parts, "")


def _part(part: MessagePart, where: str, options: MediaOptions) -> str | dict[str, Any]:
    if part.type in TEXT_PARTS:
        if part.text is None:
            raise missing_parameter(f"{where}.text")
        return part.text
    if part.type == "refusal":
        if part.refusal is None:
            raise missing_parameter(f"{where}.refusal")
        return part.refusal
    if part.type in MEDIA_PARTS:
        return media_part(part, where, options)
    if part.type == "file":
        return file_part(part, where, options)
    if part.type == "input_file":
        raise Unsupported("'input_file' belongs to the Responses API; a chat has files as parts of type 'file'.", where)
    raise BadRequest(f"Invalid value for '{where}.type': {part.type[:50]!r}.", f"{where}.type", "invalid_value")
