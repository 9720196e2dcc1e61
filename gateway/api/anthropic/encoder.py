"""Anthropic's messages: the canonical events encoded as stream events, or folded into one message."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, assert_never

import msgspec
from msgspec import UNSET

from gateway.api.anthropic import response as out
from gateway.api.anthropic.response import event_name
from gateway.api.common.extras import MakeExtras, no_extras
from gateway.errors import ApiError
from protocol.from_worker import Delta, DeltaKind, Finish, Usage

_encode = msgspec.json.Encoder().encode
_EMPTY: Final = Usage(0, 0, 0)


@dataclass(frozen=True, slots=True)
class MessageAdditions:
    """Functions for the fields of a message that its request asks for."""

    diagnostics: Callable[[], out.Diagnostics] = lambda: UNSET
    extras: MakeExtras = no_extras


NO_ADDITIONS: Final = MessageAdditions()


class MessageStream:
    """`StreamEncoder` of one sequence. The answer consists of content blocks, each of which is opened, filled and
    closed.
    """

    def __init__(self, message_id: str, model: str, additions: MessageAdditions = NO_ADDITIONS) -> None:
        self._id = message_id
        self._model = model
        self._additions = additions
        self._blocks = 0
        self._open: DeltaKind | None = None
        self._thought = hashlib.blake2b(digest_size=32)
        self._ending = out.MessageEnd("end_turn", None)
        self._usage = _EMPTY

    def bind(self, rids: Sequence[int]) -> None:
        assert len(rids) == 1, "a message is one sequence"

    def begin(self, prompt_tokens: int) -> bytes:
        usage = out.AnthropicUsage(prompt_tokens, 0)
        message = out.AnthropicMessage(
            self._id, "assistant", self._model, [], None, None, usage, self._additions.diagnostics()
        )
        return _sse(out.MessageStart(message))

    def encode(self, deltas: Sequence[Delta]) -> bytes:
        return b"".join([self._delta(delta) for delta in deltas])

    def keepalive(self) -> bytes:
        return _sse(out.PingEvent())

    def error(self, error: ApiError) -> bytes:
        return _sse(out.error_body(error))

    def end(self) -> bytes:
        events = self._close()
        if not self._blocks:  # Clients require at least one block.
            events += self._start(DeltaKind.TEXT, out.TextBlock("")) + self._close()
        last = out.MessageDelta(self._ending, out.AnthropicUsage.of(self._usage), self._additions.extras())
        return events + _sse(last) + _sse(out.MessageStop())

    def _delta(self, delta: Delta) -> bytes:
        events = self._event(delta) if delta.text or delta.kind in (DeltaKind.TOOL_BEGIN, DeltaKind.TOOL_END) else b""
        if delta.finish is not None:
            self._ending = ending(delta)
            self._usage = delta.usage or _EMPTY
        return events

    def _event(self, delta: Delta) -> bytes:
        match delta.kind:
            case DeltaKind.TEXT:
                return self._ensure(DeltaKind.TEXT, out.TextBlock("")) + self._piece(out.TextBlockDelta(delta.text))
            case DeltaKind.REASONING:
                self._thought.update(delta.text.encode())
                return self._ensure(DeltaKind.REASONING, out.ThinkingBlock("")) + self._piece(
                    out.ThinkingDelta(delta.text)
                )
            case DeltaKind.TOOL_BEGIN:
                assert delta.tool is not None
                return self._close() + self._start(
                    DeltaKind.TOOL_BEGIN, out.ToolUseBlock(delta.tool.call_id, delta.tool.name, {})
                )
            case DeltaKind.TOOL_ARGS:
                return self._piece(out.InputJsonDelta(delta.text))
            case DeltaKind.TOOL_END:
                return self._close()
            case _:
                assert_never(delta.kind)

    def _ensure(self, kind: DeltaKind, block: out.Content) -> bytes:
        return b"" if self._open is kind else self._close() + self._start(kind, block)

    def _start(self, kind: DeltaKind, block: out.Content) -> bytes:
        self._open = kind
        self._blocks += 1
        return _sse(out.BlockStart(self._blocks - 1, block))

    def _piece(self, piece: out.TextBlockDelta | out.ThinkingDelta | out.SignatureDelta | out.InputJsonDelta) -> bytes:
        return _sse(out.BlockDelta(self._blocks - 1, piece))

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        events = b""
        if self._open is DeltaKind.REASONING:
            events = self._piece(out.SignatureDelta(signature(self._thought)))
            self._thought = hashlib.blake2b(digest_size=32)
        self._open = None
        return events + _sse(out.BlockStop(self._blocks - 1))


class MessageFold:
    """`Fold` of one message, with the same content as `MessageStream`."""

    def __init__(self, message_id: str, model: str, additions: MessageAdditions = NO_ADDITIONS) -> None:
        self._id = message_id
        self._model = model
        self._additions = additions
        self._blocks: list[tuple[DeltaKind, list[str], str, str]] = []
        self._ending = out.MessageEnd("end_turn", None)
        self._usage = _EMPTY

    def bind(self, rids: Sequence[int]) -> None:
        self._blocks.clear()

    def add(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            match delta.kind:
                case DeltaKind.TEXT | DeltaKind.REASONING:
                    if delta.text:
                        self._text(delta)
                case DeltaKind.TOOL_BEGIN:
                    assert delta.tool is not None
                    self._blocks.append((delta.kind, [], delta.tool.call_id, delta.tool.name))
                case DeltaKind.TOOL_ARGS:
                    self._blocks[-1][1].append(delta.text)
                case DeltaKind.TOOL_END:
                    self._blocks.append((delta.kind, [], "", ""))
                case _:
                    assert_never(delta.kind)
            if delta.finish is not None:
                self._ending, self._usage = ending(delta), delta.usage or _EMPTY

    def result(self) -> bytes:
        content = [
            _content(kind, "".join(texts), call_id, name)
            for kind, texts, call_id, name in self._blocks
            if kind is not DeltaKind.TOOL_END
        ]
        return _encode(
            out.AnthropicMessage(
                self._id,
                "assistant",
                self._model,
                content or [out.TextBlock("")],
                self._ending.stop_reason,
                self._ending.stop_sequence,
                out.AnthropicUsage.of(self._usage),
                self._additions.diagnostics(),
                self._additions.extras(),
            )
        )

    def _text(self, delta: Delta) -> None:
        if not self._blocks or self._blocks[-1][0] is not delta.kind:
            self._blocks.append((delta.kind, [], "", ""))
        self._blocks[-1][1].append(delta.text)


def ending(delta: Delta) -> out.MessageEnd:
    """Return the stop reason and the stop sequence of a message, as Anthropic's API names them."""
    assert delta.finish is not None
    if delta.finish is Finish.STOP and delta.stop:
        return out.MessageEnd("stop_sequence", delta.stop)
    return out.MessageEnd(out.STOP_REASONS.get(delta.finish, "end_turn"), None)


def signature(thought: "hashlib.blake2b") -> str:
    """Return an opaque signature for a thinking block, because the real API sends one; nothing here depends on it."""
    return thought.hexdigest()


def _content(kind: DeltaKind, text: str, call_id: str, name: str) -> out.Content:
    if kind is DeltaKind.TEXT:
        return out.TextBlock(text)
    if kind is DeltaKind.REASONING:
        return out.ThinkingBlock(text, signature(hashlib.blake2b(text.encode(), digest_size=32)))
    try:
        return out.ToolUseBlock(call_id, name, msgspec.json.decode(text or "{}", type=dict))
    # The input was cut off by max_tokens. A client that collects the stream gets the same incomplete input.
    except msgspec.DecodeError:
        return out.ToolUseBlock(call_id, name, {})


def _sse(event: out.Event) -> bytes:
    return b"event: " + event_name(event).encode() + b"\ndata: " + _encode(event) + b"\n\n"
