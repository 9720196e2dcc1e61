"""Event stream of a parser: merges adjacent events, numbers calls, and decides which whitespace is markup."""

import json
import re
from collections.abc import Callable
from typing import Final

import msgspec

from protocol.from_worker import DeltaKind, ToolCallDelta
from worker.output.stops import encodable

# Matches a string or a bracket. A string without its closing quote extends to the end of the text, so that no further
# string is searched inside it.
_BRACKET: Final = re.compile(r'"(?:[^"\\]|\\.)*+"?|[][{}]')
_CLOSERS: Final = {"{": "}", "[": "]"}
# Matches a call id that every client can send back. A model's id is kept only if it matches.
_CALL_ID: Final = re.compile(r"[\w.:-]{1,64}", re.ASCII)


class Event(msgspec.Struct, frozen=True):
    """Piece of output. `tool` is set on the three TOOL_* kinds; every TOOL_BEGIN has its TOOL_END."""

    kind: DeltaKind
    text: str = ""
    tool: ToolCallDelta | None = None


class ParsedOutput:
    """Collector of events. Whitespace at the edge of a block is held until more text of the block follows.

    Whitespace is dropped at both ends of reasoning, between blocks, and before the first content after a block.
    `keep_gap` keeps it between reasoning and content; `trim_before_tool` drops it between content and a call.
    """

    def __init__(self, new_id: Callable[[], str], keep_gap: bool, trim_before_tool: bool) -> None:
        self._new_id = new_id
        self._keep_gap = keep_gap
        self._trim = trim_before_tool
        self._events: list[Event] = []
        self._kind = DeltaKind.TEXT
        self._parts: list[str] = []
        self._held: list[str] = []
        self._tool: ToolCallDelta | None = None
        self._args: list[str] = []
        self._brace = ""
        self._ids: set[str] = set()
        self.calls = 0
        self._has_content = False
        self._after_block = False
        self.is_blank = True  # whether there was only whitespace since the last block
        self.is_line_start = True
        self.in_reasoning = False
        self.is_reasoning_open = False
        self.malformed = 0
        self.is_broken = False  # whether the arguments of a call are invalid JSON, or lack a part

    @property
    def in_call(self) -> bool:
        return self._tool is not None

    def drain(self) -> list[Event]:
        """Return the events since the previous call."""
        self._flush()
        events, self._events = self._events, []
        return events

    def text(self, text: str) -> None:
        """Add content."""
        if self.in_reasoning:
            self.end_reasoning()
        is_gap = self._after_block and not self._has_content and (self.calls > 0 or not self._keep_gap)
        self._spaced(DeltaKind.TEXT, text, is_gap)

    def reasoning(self, text: str) -> None:
        if not self.in_reasoning:
            self._close_content(trim=False)
            self.in_reasoning = self.is_blank = self.is_reasoning_open = True
        self._spaced(DeltaKind.REASONING, text, True)

    def open_reasoning(self) -> None:
        """Mark the beginning of a reasoning block, which is still empty."""
        self.is_reasoning_open = True

    def end_reasoning(self, keep_space: bool = False) -> None:
        """End the reasoning block, even if it is empty."""
        self.is_reasoning_open = False
        if keep_space and self.in_reasoning and not self.is_blank:
            self._release()
        if self.in_reasoning or not self._has_content:
            self._held.clear()
            self.in_reasoning, self.is_blank, self.is_line_start, self._after_block = False, True, True, True

    def close_section(self) -> None:
        """End markup that has no meaning itself; the whitespace around it is dropped."""
        self._held.clear()
        self.is_blank = self._after_block = True

    def begin(self, name: str, call_id: str = "") -> None:
        """Announce a call. A `call_id` that is malformed or already used is replaced by a new one."""
        if self.in_reasoning:
            self.end_reasoning()
        self.is_reasoning_open = False
        self._close_content(self._trim)
        self._flush()
        if call_id in self._ids or not _CALL_ID.fullmatch(call_id):
            call_id = self._new_id()
        self._ids.add(call_id)
        self._tool = ToolCallDelta(index=self.calls, call_id=call_id, name=encodable(name))
        self._events.append(Event(DeltaKind.TOOL_BEGIN, tool=self._tool))
        self._args.clear()
        self.calls += 1

    def args(self, text: str) -> None:
        """Add to the arguments of the call. A closing brace at their end is held until the call has ended."""
        if text:
            text, self._brace = (self._brace + text[:-1], "}") if text[-1] == "}" else (self._brace + text, "")
        if text:
            self._args.append(text)
            self._put(DeltaKind.TOOL_ARGS, text)

    def _release_brace(self) -> None:
        if self._brace:
            self._args.append(self._brace)
            self._put(DeltaKind.TOOL_ARGS, self._brace)
            self._brace = ""

    def break_off(self, is_closable: bool) -> None:
        """End a malformed call; add the missing brackets of its arguments if `is_closable`. Otherwise the arguments
        stay unclosed, even if only something after them is wrong: it may be a further argument."""
        missing = _missing("".join([*self._args, self._brace]))
        if missing and is_closable:
            self.args(missing)
        elif missing != "" or not is_closable:
            self.is_broken = True
            self._brace = "" if missing == "" else self._brace
        self.end()

    def mark_incomplete(self) -> None:
        """Report that the arguments of a call lack a part of what the model wrote for them."""
        self.malformed += 1
        self.is_broken = True

    def end(self) -> None:
        self._release_brace()
        self._flush()
        if self._tool is not None:
            tool = ToolCallDelta(index=self._tool.index, call_id=self._tool.call_id)
            self._events.append(Event(DeltaKind.TOOL_END, tool=tool))
        self._tool, self.is_blank, self.is_line_start, self._after_block = None, True, True, True

    def finish(self) -> None:
        if self.in_reasoning or (self.is_blank and self._after_block):
            self._held.clear()
        self._release()

    def _spaced(self, kind: DeltaKind, text: str, drop_leading: bool) -> None:
        if self.is_blank and drop_leading:
            text = text.lstrip()
        body = text.rstrip()
        if body:
            self._release()
            self._put(kind, body)
            self.is_blank = self.is_line_start = False
            self._has_content |= kind is DeltaKind.TEXT
        if len(body) < len(text):
            self._held.append(text[len(body) :])
            self.is_line_start = self.is_line_start or "\n" in self._held[-1]

    def _close_content(self, trim: bool) -> None:
        if self.is_blank or trim:
            self._held.clear()
        self._release()

    def _release(self) -> None:
        if self._held:
            self._put(DeltaKind.REASONING if self.in_reasoning else DeltaKind.TEXT, "".join(self._held))
            self._held.clear()

    def _put(self, kind: DeltaKind, text: str) -> None:
        if kind is not self._kind:
            self._flush()
            self._kind = kind
        self._parts.append(text)

    def _flush(self) -> None:
        if self._parts:
            tool = None
            if self._kind is DeltaKind.TOOL_ARGS and self._tool is not None:
                tool = ToolCallDelta(index=self._tool.index, call_id=self._tool.call_id)
            self._events.append(Event(self._kind, "".join(self._parts), tool))
            self._parts.clear()


def _missing(arguments: str) -> str | None:
    """Return the brackets that complete the JSON `arguments`; None if anything else is missing."""
    open_: list[str] = []
    for match in _BRACKET.finditer(arguments):
        if match[0] in _CLOSERS:
            open_.append(_CLOSERS[match[0]])
        elif match[0] in "]}" and open_:
            open_.pop()
    closing = "".join(reversed(open_))
    try:
        json.loads(arguments + closing)
    except ValueError:
        return None
    return closing
