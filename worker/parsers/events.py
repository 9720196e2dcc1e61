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
    it was announced gets the brackets that it lacks, if nothing else is missing and the model itself has ended it. If
    not, its arguments stay unclosed, so that they are no JSON and nobody runs half a command, and the output is
    `is_broken`. Either way it counts as `malformed`.
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
    def is_broken(self) -> bool:
        """Whether the arguments of a call are no JSON, so that the output must not finish as if it were whole."""
        ...

    @property
    def malformed(self) -> int:
        """How many calls broke."""
        ...

    def note_control(self, at: int) -> None:
        """At this character of all that is fed, which comes after this, a control token begins."""
        ...

    def ignore_controls(self) -> None:
        """From here on, go by the text alone."""
        ...

    def feed(self, text: str) -> list[Event]:
        """The events that `text` completes."""
        ...

    def finish(self, is_cut: bool = False) -> list[Event]:
        """The end of the output: everything that was held back. `is_cut`: it is not the model that has ended it."""
        ...
