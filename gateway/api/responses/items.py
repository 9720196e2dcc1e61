"""Output items of a response, made from canonical events, with the stream events of each step.

Decoder of the text of a free-form tool call, read from the JSON arguments `{"input": "…"}` while they
are generated.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, assert_never

import msgspec
from msgspec import UNSET

from gateway.api.openai.response import ContentLogprob, chat_logprobs
from gateway.api.responses import response as out
from gateway.api.responses.lowering import seal
from gateway.api.responses.request import INPUT, ToolIdentity
from protocol.from_worker import Delta, DeltaKind, Finish, ToolCallDelta, Usage

# Matches the JSON before the value of `input`. Arguments of another shape are parsed once they are complete.
_HEAD: Final = re.compile(r'\s*\{\s*"' + INPUT + r'"\s*:\s*"')
# Matches a run of plain characters, an escape, or a surrogate pair of escapes.
_PIECE: Final = re.compile(
    r'[^"\\]+|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\[^u]|\\u'
)
# Matches an incomplete escape or surrogate pair at the end of the JSON so far.
_CUT: Final = re.compile(r"\\(u[0-9a-fA-F]{0,3})?$|\\u[dD][89abAB][0-9a-fA-F]{2}(\\(u[0-9a-fA-F]{0,3})?)?$")
_ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}


class InputReader:
    """Incremental decoder. It takes pieces of JSON and returns pieces of text, which never change later."""

    def __init__(self) -> None:
        self._raw: list[str] = []
        self._parts: list[str] = []
        self._pending = ""
        self._is_inside = False
        self._is_over = False

    @property
    def value(self) -> str:
        """Text that was returned so far."""
        return "".join(self._parts)

    def feed(self, text: str) -> str:
        """Take a piece of the arguments and return the text that it adds."""
        self._raw.append(text)
        if self._is_over:
            return ""
        self._pending += text
        if not self._is_inside:
            head = _HEAD.match(self._pending)
            if head is None:
                return ""
            self._is_inside = True
            self._pending = self._pending[head.end() :]
        return self._emit(self._read(is_end=False))

    def finish(self) -> str:
        """Return the rest of the text. If the arguments have another shape, that is the whole text."""
        if self._is_over:
            return ""
        if self._is_inside:
            return self._emit(self._read(is_end=True))
        self._is_over = True
        return self._emit(_salvage("".join(self._raw)))

    def _emit(self, text: str) -> str:
        if text:
            self._parts.append(text)
        return text

    def _read(self, is_end: bool) -> str:
        """Decode up to the closing quote, or up to an incomplete escape."""
        pending = self._pending
        cut = None if is_end else _CUT.search(pending)
        limit = len(pending) if cut is None else cut.start()
        decoded: list[str] = []
        position = 0
        while position < limit:
            if pending[position] == '"':
                self._is_over = True
                break
            piece = _PIECE.match(pending, position)
            if piece is None:  # What remains is a lone backslash, with which the input ends.
                break
            decoded.append(_decode(piece.group()))
            position = piece.end()
        self._pending = pending[position:]
        return "".join(decoded)


def _decode(piece: str) -> str:
    if piece[0] != "\\":
        return piece
    if piece[1] != "u":
        # An invalid escape is kept unchanged.
        return _ESCAPES.get(piece[1]) or (piece[1] if piece[1] in '"\\/' else piece)
    if len(piece) < 6:
        return piece
    units = [int(unit, 16) for unit in piece.split("\\u")[1:]]
    return b"".join(unit.to_bytes(2, "big") for unit in units).decode("utf-16-be", "replace")


def _salvage(raw: str) -> str:
    """Return the text of arguments of another shape: the only string in them, or all of them unchanged."""
    try:
        arguments = json.loads(raw, strict=False)
    except (ValueError, RecursionError):
        return raw
    if isinstance(arguments, dict):
        if isinstance(arguments.get(INPUT), str):
            return _encodable(arguments[INPUT])
        texts = [value for value in arguments.values() if isinstance(value, str)]
        if len(texts) == 1 and len(arguments) == 1:
            return _encodable(texts[0])
    return _encodable(arguments) if isinstance(arguments, str) else raw


def _encodable(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


Events = list[out.Event]

IN_PROGRESS: Final = "in_progress"
COMPLETED: Final = "completed"
INCOMPLETE: Final = "incomplete"


class ResponseOutput:
    """Items of one response so far. The response's encoder owns them. Item ids are derived from the response's `stem`.

    With `is_sealed`, reasoning is also sent as `encrypted_content`.
    """

    def __init__(self, stem: str, forms: Mapping[str, ToolIdentity], is_sealed: bool) -> None:
        self._stem = stem
        self.forms = forms
        self.is_sealed = is_sealed
        self._done: list[out.Item] = []
        self._open: _Message | _Reasoning | _CallItem | None = None
        # Log-probabilities of text that the parser still holds back.
        self._early_logprobs: list[ContentLogprob] = []
        # Number of deltas added so far.
        self.deltas = 0
        self.finish: Finish | None = None
        self.usage: Usage | None = None

    def add(self, delta: Delta) -> Events:
        """Add a delta and return its events."""
        self.deltas += 1
        events = self._add(delta)
        if delta.finish is not None:
            self.finish, self.usage = delta.finish, delta.usage
        return events

    @property
    def is_cut(self) -> bool:
        """Whether the output ended at its token limit. A limit of no tokens only fills the prompt cache."""
        return self.finish is Finish.LENGTH and not self.is_prewarm

    @property
    def is_prewarm(self) -> bool:
        return self.finish is Finish.LENGTH and self.usage is not None and self.usage.completion == 0

    def close(self) -> Events:
        """End the last item and return the events for that. The item is incomplete if the token limit was reached."""
        status = INCOMPLETE if self.is_cut else COMPLETED
        if self._open is None and not self._done and not self.is_prewarm:
            # Clients expect a message, even if it is empty.
            return self._start(_Message(self._item_id("msg"), 0)) + self._finish(status)
        return self._finish(status)

    def cut(self) -> Events:
        """End the last item, which is incomplete, and return the events for that."""
        return self._finish(INCOMPLETE)

    def calls(self) -> list[out.FunctionCall | out.CustomToolCall]:
        """Return the calls so far, including one that is not complete."""
        return [item for item in self.items() if isinstance(item, out.FunctionCall | out.CustomToolCall)]

    def items(self) -> list[out.Item]:
        """Return all items, including the open item with its content so far."""
        return self._done if self._open is None else [*self._done, self._open.snapshot(INCOMPLETE)]

    def _add(self, delta: Delta) -> Events:
        match delta.kind:
            case DeltaKind.TEXT:
                return self._add_text(delta)
            case DeltaKind.REASONING:
                return self._add_reasoning(delta.text) if delta.text else []
            case DeltaKind.TOOL_BEGIN:
                assert delta.tool is not None, "the first delta of a call names its tool"
                return self._finish(COMPLETED) + self._start(self._call(delta.tool))
            case DeltaKind.TOOL_ARGS:
                assert isinstance(self._open, _CallItem), "arguments come after the beginning of a call"
                return self._open.add(delta.text) if delta.text else []
            case DeltaKind.TOOL_END:
                assert isinstance(self._open, _CallItem), "the end of a call comes after its arguments"
                return self._finish(COMPLETED if self._open.has_json else INCOMPLETE)
            case _:
                assert_never(delta.kind)

    def _add_text(self, delta: Delta) -> Events:
        logprobs = [] if delta.logprobs is None else chat_logprobs(delta.logprobs)
        if isinstance(self._open, _Message):
            return self._open.add(delta.text, logprobs) if delta.text or logprobs else []
        self._early_logprobs += logprobs
        if not delta.text:
            return []
        logprobs, self._early_logprobs = self._early_logprobs, []
        events = self._finish(COMPLETED)
        message = _Message(self._item_id("msg"), len(self._done))
        return events + self._start(message) + message.add(delta.text, logprobs)

    def _add_reasoning(self, text: str) -> Events:
        if isinstance(self._open, _Reasoning):
            return self._open.add(text)
        events = self._finish(COMPLETED)
        reasoning = _Reasoning(self._item_id("rs"), len(self._done), self.is_sealed)
        return events + self._start(reasoning) + reasoning.add(text)

    def _call(self, tool: ToolCallDelta) -> "_CallItem":
        form = self.forms.get(tool.name) or ToolIdentity(tool.name)
        prefix, call = ("ctc", _CustomCall) if form.is_custom else ("fc", _CallItem)
        return call(self._item_id(prefix), len(self._done), tool.call_id, form)

    def _item_id(self, prefix: str) -> str:
        return f"{prefix}_{self._stem}{len(self._done):04x}"

    def _start(self, item: "_Message | _Reasoning | _CallItem") -> Events:
        self._open = item
        if not isinstance(item, _Message):
            self._early_logprobs = []
        return item.start()

    def _finish(self, status: str) -> Events:
        if self._open is None:
            return []
        item, self._open = self._open, None
        events = item.finish(status)
        self._done.append(item.snapshot(status))
        return events


@dataclass(slots=True)
class _Message:
    id: str
    index: int
    texts: list[str] = field(default_factory=list[str])
    logprobs: list[ContentLogprob] = field(default_factory=list[ContentLogprob])

    def start(self) -> Events:
        return [
            out.ItemAdded(self.index, out.OutputMessage(self.id, IN_PROGRESS, [])),
            out.PartAdded(self.id, self.index, 0, out.OutputText("")),
        ]

    def add(self, text: str, logprobs: list[ContentLogprob]) -> Events:
        self.texts.append(text)
        self.logprobs += logprobs
        return [out.OutputTextDelta(self.id, self.index, 0, text, logprobs)]

    def snapshot(self, status: str) -> out.Item:
        return out.OutputMessage(self.id, status, [self._part()])

    def finish(self, status: str) -> Events:
        part = self._part()
        return [
            out.OutputTextDone(self.id, self.index, 0, part.text, part.logprobs),
            out.PartDone(self.id, self.index, 0, part),
            out.ItemDone(self.index, self.snapshot(status)),
        ]

    def _part(self) -> out.OutputText:
        return out.OutputText("".join(self.texts), logprobs=self.logprobs)


@dataclass(slots=True)
class _Reasoning:
    id: str
    index: int
    is_sealed: bool
    texts: list[str] = field(default_factory=list[str])

    def start(self) -> Events:
        return [
            out.ItemAdded(self.index, out.ReasoningItem(self.id, [])),
            out.PartAdded(self.id, self.index, 0, out.ReasoningText("")),
        ]

    def add(self, text: str) -> Events:
        self.texts.append(text)
        return [out.ReasoningDelta(self.id, self.index, 0, text)]

    def snapshot(self, status: str) -> out.Item:
        text = "".join(self.texts)
        return out.ReasoningItem(
            self.id, [out.ReasoningText(text)], encrypted_content=seal(text) if self.is_sealed else UNSET
        )

    def finish(self, status: str) -> Events:
        text = "".join(self.texts)
        return [
            out.ReasoningDone(self.id, self.index, 0, text),
            out.PartDone(self.id, self.index, 0, out.ReasoningText(text)),
            out.ItemDone(self.index, self.snapshot(status)),
        ]


@dataclass(slots=True)
class _CallItem:
    id: str
    index: int
    call_id: str
    form: ToolIdentity
    texts: list[str] = field(default_factory=list[str])

    @property
    def has_json(self) -> bool:
        """Whether the arguments are valid JSON. A call that was cut off must not look executable."""
        try:
            msgspec.json.decode("".join(self.texts), type=msgspec.Raw)
        except msgspec.DecodeError:
            return False
        return True

    def start(self) -> Events:
        return [out.ItemAdded(self.index, self.snapshot(IN_PROGRESS))]

    def add(self, text: str) -> Events:
        self.texts.append(text)
        return [out.ArgumentsDelta(self.id, self.index, text)]

    def snapshot(self, status: str) -> out.Item:
        namespace = self.form.namespace or UNSET
        return out.FunctionCall(self.id, status, self.call_id, self.form.name, "".join(self.texts), namespace)

    def finish(self, status: str) -> Events:
        return [
            out.ArgumentsDone(self.id, self.index, self.form.name, "".join(self.texts)),
            out.ItemDone(self.index, self.snapshot(status)),
        ]


@dataclass(slots=True)
class _CustomCall(_CallItem):
    """Call of a custom tool, whose free-form input is decoded from the arguments."""

    reader: InputReader = field(default_factory=InputReader)

    def add(self, text: str) -> Events:
        self.texts.append(text)
        return self._delta(self.reader.feed(text))

    def snapshot(self, status: str) -> out.Item:
        namespace = self.form.namespace or UNSET
        return out.CustomToolCall(self.id, status, self.call_id, self.form.name, self.reader.value, namespace)

    def finish(self, status: str) -> Events:
        events = self._delta(self.reader.finish())
        return [
            *events,
            out.InputDone(self.id, self.index, self.reader.value),
            out.ItemDone(self.index, self.snapshot(status)),
        ]

    def _delta(self, text: str) -> Events:
        return [out.CustomInputDelta(self.id, self.index, text)] if text else []
