"""Lowering of the messages and blocks of an Anthropic conversation to turns."""

from collections.abc import Iterable
from typing import Any, Final, TypeVar

import msgspec

from gateway.api.anthropic.content_blocks import SHOWN, Block, MessageParam
from gateway.api.anthropic.document_block import Part, document_parts, refuse_citations
from gateway.api.common import canonical
from gateway.api.common.canonical import Call, Content
from gateway.errors import BadRequest, Unsupported, missing_parameter
from gateway.media.reference import IMAGE, by_base64, by_url

T = TypeVar("T")

# Claude Code's first system block begins with this text, followed by a value that changes with every session. The line
# is removed, because the value would defeat the prefix cache.
VOLATILE_SYSTEM: Final = "x-anthropic-billing-header:"
# Text between joined blocks and messages. With it, a list of texts gives the same prompt as one string.
JOINT: Final = "\n\n"


def system_text(system: str | list[Block] | None) -> str:
    """Return the text of the system prompt. Raises `BadRequest`."""
    if isinstance(system, str):
        return _lasting(system)
    texts = [_lasting(_only_text(block, f"system.{index}")) for index, block in enumerate(system or ())]
    return JOINT.join(text for text in texts if text)


def _only_text(block: Block, where: str) -> str:
    return canonical.only_text(canonical.content(_parts(block, where), JOINT), where)


def _lasting(text: str) -> str:
    """Remove the first line of the system text if it differs between sessions."""
    return text.partition("\n")[2].lstrip("\n") if text.startswith(VOLATILE_SYSTEM) else text


def message_turns(message: MessageParam, where: str) -> list[dict[str, Any]]:
    """Lower one message to turns. Each tool result becomes a turn. Raises `BadRequest`."""
    blocks = [Block("text", message.content)] if isinstance(message.content, str) else message.content
    match message.role:
        case "user":
            return _user_turns(blocks, where)
        case "assistant":
            return [_assistant_turn(blocks, where)]
        case "system":
            # Blocks that are left out announce changes of tools, which are also in the request's list of tools.
            shown = [(index, block) for index, block in enumerate(blocks) if block.type in SHOWN]
            return [canonical.system(JOINT.join(_only_text(block, f"{where}.content.{at}") for at, block in shown))]
        case role:
            raise BadRequest(f"{where}.role: {role[:40]!r} is none of user, assistant, system.", f"{where}.role")


def _user_turns(blocks: list[Block], where: str) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    parts: list[Part] = []
    for index, block in enumerate(blocks):
        at = f"{where}.content.{index}"
        if block.type != "tool_result":
            parts += _parts(block, at)
            continue
        if parts:
            turns.append(canonical.user(canonical.content(parts, JOINT)))
            parts = []
        turns.append(canonical.tool_result(block.tool_use_id or "", "", _result(block, at)))
    if parts or not turns:
        turns.append(canonical.user(canonical.content(parts, JOINT)))
    return turns


def left_out_blocks(messages: Iterable[MessageParam]) -> list[str]:
    """Return the names of the types of blocks that are left out of the prompt."""
    blocks = (block for message in messages if isinstance(message.content, list) for block in message.content)
    return [f"messages.{kind}" for kind in dict.fromkeys(block.type for block in blocks) if kind not in SHOWN]


def _assistant_turn(blocks: list[Block], where: str) -> dict[str, Any]:
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[Call] = []
    for index, block in enumerate(blocks):
        at = f"{where}.content.{index}"
        match block.type:
            case "thinking":
                reasoning.append(_required(block.thinking, f"{at}.thinking"))
            case "tool_use":
                arguments = msgspec.json.encode(block.input or {}).decode()
                calls.append(Call(block.id or "", _required(block.name, f"{at}.name"), arguments))
            case "text":
                texts.append(_required(block.text, f"{at}.text"))
            case kind if kind in SHOWN:
                message = f"{at}: blocks of type {kind!r} do not belong in messages of the assistant."
                raise BadRequest(message, at, "invalid_value")
            case _:
                pass  # Redacted thinking and server tools are left out, because prompts have no form for them.
    return canonical.assistant(JOINT.join(texts), calls, JOINT.join(reasoning) or None)


def _result(block: Block, where: str) -> Content:
    shown = _content(block, where)
    if not block.is_error:
        return shown
    return f"Error: {shown}" if isinstance(shown, str) else [{"type": "text", "text": "Error:"}, *shown]


def _content(block: Block, where: str) -> Content:
    match block.content:
        case str(text):
            return text
        case list(blocks):
            parts = [part for index, inner in enumerate(blocks) for part in _parts(inner, f"{where}.content.{index}")]
            return canonical.content(parts, JOINT)
        case None if block.text is None:
            return ""
        case _:
            param = f"{where}.content"
            raise BadRequest(f"{param}: expected text or a list of blocks.", param, "invalid_value")


def _parts(block: Block, where: str) -> list[Part]:
    """Lower a block to its texts and media."""
    refuse_citations(block, where)
    match block.type:
        case "image":
            return [_image(block, where)]
        case "document":
            return document_parts(block, where, _parts)
        case _:
            return [_text(block, where)]


def _image(block: Block, where: str) -> dict[str, Any]:
    source = block.source if isinstance(block.source, dict) else {}
    match source:
        case {"type": "base64", "data": str(data)}:
            return by_base64(IMAGE, data, where)
        case {"type": "url", "url": str(url)}:
            return by_url(IMAGE, url, where)
        case {"type": "file"}:
            raise Unsupported(f"{where}: there are no uploaded files here; send the image as base64.", where)
        case _:
            param = f"{where}.source"
            raise BadRequest(
                f"{param}: an image's source is of type base64, with data, or url.", param, "invalid_value"
            )


def _text(block: Block, where: str) -> str:
    match block.type:
        case "text":
            return _required(block.text, f"{where}.text")
        case "search_result":
            return _search_result(block, where)
        case "tool_reference":
            return f"Tool available: {_required(block.tool_name, f'{where}.tool_name')}"
        case kind:
            raise Unsupported(f"{where}: content blocks of type {kind[:40]!r} are not supported.", where)


def _search_result(block: Block, where: str) -> str:
    _required(block.content, f"{where}.content")
    if isinstance(block.source, dict):
        param = f"{where}.source"
        raise BadRequest(f"{param}: expected text.", param, "invalid_value")
    text = canonical.only_text(_content(block, where), where)
    return f"{block.title or ''}\n{block.source or ''}\n{text}".strip()


def _required(value: T | None, param: str) -> T:
    if value is None:
        raise missing_parameter(param)
    return value
