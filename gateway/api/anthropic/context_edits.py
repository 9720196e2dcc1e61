"""Anthropic's `context_management`: edits of a conversation before the model reads it."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Final

from msgspec import Meta, Struct, structs

from gateway.api.anthropic.content_blocks import MessageParam
from gateway.api.common.doc_hints import words
from gateway.errors import BadRequest, Unsupported

_EDIT: Final = "clear_thinking_20251015"
_THINKING: Final = frozenset({"thinking", "redacted_thinking"})
_ALL: Final = "all"
_TURNS: Final = "thinking_turns"


class ThinkingTurns(Struct, frozen=True):
    """Number of turns whose thinking is kept."""

    type: Annotated[str, words(_ALL, _TURNS)]
    value: Annotated[int, Meta(ge=1, le=1 << 40)] = 1


class ContextEdit(Struct, frozen=True):
    """Edit that removes thinking. Without `keep`, only the thinking of the newest turn is kept."""

    type: Annotated[str, words(_EDIT)]
    keep: ThinkingTurns | Annotated[str, words(_ALL)] | None = None


class ContextManagement(Struct, frozen=True):
    edits: list[ContextEdit] | None = None


def edited(messages: Sequence[MessageParam], management: ContextManagement | None) -> Sequence[MessageParam]:
    """Return the conversation after all edits. Raises `BadRequest`."""
    for index, edit in enumerate(management.edits or () if management is not None else ()):
        kept = _kept_turns(edit, f"context_management.edits.{index}")
        if kept is not None:
            old = {at for turn in [*_thinking_turns(messages)][:-kept] for at in turn}
            messages = [_without_thinking(each) if at in old else each for at, each in enumerate(messages)]
    return messages


def _kept_turns(edit: ContextEdit, where: str) -> int | None:
    """Return the number of turns whose thinking is kept; None means all."""
    if edit.type != _EDIT:
        message = f"{where}: edits of type {edit.type[:40]!r} are not supported; '{_EDIT}' is."
        raise Unsupported(message, where)
    kind = edit.keep if isinstance(edit.keep, str) else edit.keep.type if edit.keep is not None else _TURNS
    if kind not in (_ALL, _TURNS):
        raise BadRequest(f"{where}.keep: {kind[:40]!r} is none of {_ALL}, {_TURNS}.", f"{where}.keep", "invalid_value")
    if kind == _ALL:
        return None
    return edit.keep.value if isinstance(edit.keep, ThinkingTurns) else 1


def _thinking_turns(messages: Sequence[MessageParam]) -> Iterator[list[int]]:
    """Yield the indices of each turn's messages with thinking. A turn ends at a user message that has more than tool
    results.
    """
    turn: list[int] = []
    for at, message in enumerate(messages):
        if _types(message) & _THINKING:
            turn.append(at)
        elif message.role == "user" and turn and _types(message) - {"tool_result"}:
            yield turn
            turn = []
    if turn:
        yield turn


def _types(message: MessageParam) -> set[str]:
    return {"text"} if isinstance(message.content, str) else {block.type for block in message.content}


def _without_thinking(message: MessageParam) -> MessageParam:
    blocks = [] if isinstance(message.content, str) else message.content
    return structs.replace(message, content=[block for block in blocks if block.type not in _THINKING])
