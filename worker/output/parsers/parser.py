"""Parser of one output."""

import hashlib
import itertools
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from worker.output.parsers.call import ParserContext
from worker.output.parsers.channels import ChannelMessages, Channels
from worker.output.parsers.events import Event, ParsedOutput
from worker.output.parsers.families import FAMILIES, resolve
from worker.output.parsers.reader import NO_CONTROLS, Controls, Malformed, MarkupReader, Steps
from worker.output.parsers.schema import Tools
from worker.output.parsers.think_and_calls import Conversation


def new_call_id() -> str:
    """Return an id for a call that has none."""
    return f"call_{secrets.token_hex(12)}"


def call_ids(seed: str) -> Callable[[], str]:
    """Return a generator of call ids for one answer, which depend only on `seed`, also in another process."""
    at = itertools.count()
    return lambda: f"call_{hashlib.sha256(f'{seed}:{next(at)}'.encode()).hexdigest()[:24]}"


class Parser:
    """Parser from generated text to events. It never raises, whatever the text is.

    A call that breaks before its name and arguments are certain becomes TEXT, unchanged. A call that breaks after it
    was announced gets its missing brackets, if only these are missing and the model itself ended the call. Otherwise
    its arguments stay unclosed, so that they are not valid JSON and no client runs half a command, and the output is
    `is_broken`. Each broken call counts as `malformed`.
    """

    def __init__(self, ctx: ParserContext, steps: Steps[None]) -> None:
        self._r = ctx.r
        self._out = ctx.out
        self._steps = steps
        self._is_over = False
        # The grammar runs until it first waits for text, so that `in_reasoning` is correct from the start.
        self._advance()

    @property
    def saw_tool_call(self) -> bool:
        """Whether a call was announced, so that the output finishes with `tool_calls`."""
        return self._out.calls > 0

    @property
    def in_reasoning(self) -> bool:
        """Whether the text so far ends inside reasoning."""
        return self._out.is_reasoning_open

    @property
    def is_broken(self) -> bool:
        """Whether the arguments of a call are not valid JSON or lack a part, so that the output must not be reported as
        complete."""
        return self._out.is_broken

    @property
    def malformed(self) -> int:
        """Number of malformed calls."""
        return self._out.malformed

    def note_control(self, at: int) -> None:
        """Record that a control token begins at this character of the whole text, which is fed afterwards."""
        self._r.note_control(at)

    def ignore_controls(self) -> None:
        """Ignore control tokens from here on and parse by the text only."""
        self._r.controls = NO_CONTROLS

    def feed(self, text: str) -> list[Event]:
        """Return the events that `text` completes."""
        if self._is_over or not text:
            return []
        self._r.push(text)
        self._advance()
        return self._out.drain()

    def finish(self, is_cut: bool = False) -> list[Event]:
        """End the output and return the events of all held text. `is_cut` means that a limit or stop ended the output,
        not the model."""
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
            # No grammar ends before its text; if one did, the rest would be text.
            self._out.text(self._r.take(len(self._r.buf) - self._r.at))


def make_parser(
    family: str,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    start_in_reasoning: bool | None = None,
    parse_tools: bool = True,
    controls: Controls = NO_CONTROLS,
    new_id: Callable[[], str] = new_call_id,
) -> Parser:
    """Make a parser for one output of a model of `family` (a name or an alias; raises `UnknownFamily`).

    If `start_in_reasoning` is None, the family's default applies. Without `parse_tools`, the markup of calls stays in
    the text. Markup that contains one of `controls` only counts where `note_control` reported the token.
    """
    row = FAMILIES[resolve(family)]
    in_reasoning = row.opens if start_in_reasoning is None else start_in_reasoning
    ctx = ParserContext(MarkupReader(controls), ParsedOutput(new_id, row.keep_gap, row.trim_before_tool), Tools(tools))
    if isinstance(row.grammar, Channels):
        return Parser(ctx, ChannelMessages(ctx, row.grammar, parse_tools).read(in_reasoning))
    grammar = row.undeclared if row.undeclared and not tools else row.grammar
    if not parse_tools:
        grammar = replace(grammar, formats=(), opening=None)
    return Parser(ctx, Conversation(ctx, grammar).read(in_reasoning))
