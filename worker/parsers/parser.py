"""The parser of one output."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from worker.parsers.call import Context
from worker.parsers.channels import Channels, Messages
from worker.parsers.controls import NO_CONTROLS, Controls
from worker.parsers.conversation import Conversation, Grammar
from worker.parsers.events import Event, Parser
from worker.parsers.families import FAMILIES, resolve
from worker.parsers.output import Output
from worker.parsers.reader import Malformed, Reader, Steps
from worker.parsers.schema import Tools


def new_call_id() -> str:
    """An id for a call that has none."""
    return f"call_{secrets.token_hex(12)}"


def make_parser(
    family: str,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    start_in_reasoning: bool | None = None,
    parse_tools: bool = True,
    parse_reasoning: bool = True,
    controls: Controls = NO_CONTROLS,
    new_id: Callable[[], str] = new_call_id,
) -> Parser:
    """A parser for one output of a model of `family` (a name or an alias; raises `UnknownFamily`).

    `start_in_reasoning` None takes what the family's templates usually do. Without `parse_tools` or `parse_reasoning`,
    that markup stays in the text; a family of channels has its reasoning in the text then. Of markup that has one of
    `controls` in it, only what `note_control` was told of is markup.
    """
    row = FAMILIES[resolve(family)]
    in_reasoning = row.opens if start_in_reasoning is None else start_in_reasoning
    ctx = Context(Reader(controls), Output(new_id, row.keep_gap, row.trim_before_tool, parse_reasoning), Tools(tools))
    if isinstance(row.grammar, Channels):
        return _EventParser(ctx, Messages(ctx, row.grammar, parse_tools).read(in_reasoning))
    grammar = row.undeclared if row.undeclared and not tools else row.grammar
    grammar = Grammar(
        formats=grammar.formats if parse_tools else (),
        think=grammar.think if parse_reasoning else None,
        drop=grammar.drop,
        opening=grammar.opening if parse_tools else None,
        tool_ends_think=grammar.tool_ends_think,
        is_last=grammar.is_last,
    )
    return _EventParser(ctx, Conversation(ctx, grammar).read(in_reasoning))


class _EventParser:
    """Runs a grammar on the text that is there."""

    def __init__(self, ctx: Context, steps: Steps[None]) -> None:
        self._r = ctx.r
        self._out = ctx.out
        self._steps = steps
        self._is_over = False
        # Up to the first wait for text, so that `in_reasoning` holds from the start.
        self._advance()

    @property
    def saw_tool_call(self) -> bool:
        return self._out.calls > 0

    @property
    def in_reasoning(self) -> bool:
        return self._out.is_reasoning_open

    @property
    def is_broken(self) -> bool:
        return self._out.is_broken

    @property
    def malformed(self) -> int:
        return self._out.malformed

    def note_control(self, at: int) -> None:
        self._r.note_control(at)

    def ignore_controls(self) -> None:
        self._r.controls = NO_CONTROLS

    def feed(self, text: str) -> list[Event]:
        if self._is_over or not text:
            return []
        self._r.push(text)
        self._advance()
        return self._out.drain()

    def finish(self, is_cut: bool = False) -> list[Event]:
        if self._is_over:
            return []
        self._r.ended, self._r.is_cut = True, is_cut
        self._advance()
        self._is_over = True
        self._out.finish()
        return self._out.drain()

    def _advance(self) -> None:
        try:
            next(self._steps)
        except (StopIteration, Malformed):
            # No grammar ends before its text; if one did, the rest is text.
            self._out.text(self._r.take(len(self._r.buf) - self._r.at))
