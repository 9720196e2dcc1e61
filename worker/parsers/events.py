"""What a parser says: reasoning, text and tool calls, in the order in which the model wrote them."""

from typing import Protocol

import msgspec

from protocol.messages import Kind, Tool


class Event(msgspec.Struct, frozen=True):
    """One piece of output. `tool` is set on the three TOOL_* kinds; every TOOL_BEGIN has its TOOL_END."""

    kind: Kind
    text: str = ""
    tool: Tool | None = None


class Parser(Protocol):
    """Turns generated text into events. Neither method ever raises on any text.

    A call that breaks before its name and arguments are certain becomes TEXT, as it was written. One that breaks after
    it was announced keeps its arguments unclosed, so that they are no valid JSON and nobody runs half a command; either
    way it counts as `malformed`.
    """

    @property
    def saw_tool_call(self) -> bool:
        """Whether a call was announced, so that the output finishes with `tool_calls`."""
        ...

    @property
    def in_reasoning(self) -> bool:
        """Whether the text so far ends inside of reasoning."""
        ...

    @property
    def malformed(self) -> int:
        """How many calls broke."""
        ...

    def feed(self, text: str) -> list[Event]:
        """The events that `text` completes."""
        ...

    def finish(self) -> list[Event]:
        """The end of the output: everything that was held back."""
        ...
