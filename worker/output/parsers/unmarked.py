"""Calls without the markers of their format: JSON, or a declared name and its arguments as JSON."""

import json
import sys
from dataclasses import dataclass

from protocol.from_worker import DeltaKind
from worker.output.parsers.call import LOOKAHEAD_LIMIT, ParserContext, begin, end, end_fence, fence, json_arguments
from worker.output.parsers.events import Event, ParsedOutput
from worker.output.parsers.json_calls import JsonCalls
from worker.output.parsers.reader import Malformed, MarkerSet, Steps, markers
from worker.output.parsers.schema import Tools


@dataclass(frozen=True, slots=True)
class UnmarkedCalls:
    """Notation `{"name": …, "arguments": {…}}`, `name{…}` or `name({…})` of calls to declared tools, also in a fence.

    Only an output that consists of such calls has any: an answer about calls holds the same text. `ends` are the end
    markers of the family's calls, which a model may write without their start.
    """

    ends: tuple[str, ...] = ()
    starts: tuple[str, ...] = ()

    def calls(self, ctx: ParserContext, hit: str) -> Steps[None]:
        r = ctx.r
        yield from r.space()
        is_fenced = yield from fence(ctx, "")
        char = yield from r.space()
        while char:
            if char in ("{", "["):
                yield from JsonCalls((), self.ends, bare=True).calls(ctx, "")
            else:
                yield from self._named(ctx)
            if is_fenced and (yield from r.space()) == "`":
                yield from end_fence(ctx)
                return
            char = yield from r.space()
            if char not in ("{", "["):
                return

    def _named(self, ctx: ParserContext) -> Steps[None]:
        """Read a call that begins with the name of its tool."""
        r, names = ctx.r, ctx.tools.names
        name = yield from r.literal(markers(*names, *(f"functions.{name}" for name in names)))
        is_call = (yield from r.space()) == "("
        r.take(int(is_call))
        if not name or (yield from r.space()) != "{":
            raise Malformed
        yield from json_arguments(ctx, begin(ctx, name))
        if is_call:
            yield from r.expect(markers(")"))
        end(ctx)

    def are_all(self, ctx: ParserContext, turn_ends: MarkerSet) -> Steps[bool]:
        """Look ahead and return whether the rest of the output consists of these calls.

        Until the arguments of a call have begun, at most `LOOKAHEAD_LIMIT` characters are held back.
        """
        return bool((yield from ctx.r.ahead(self._read_all(ctx, turn_ends), sys.maxsize)))

    def _read_all(self, ctx: ParserContext, turn_ends: MarkerSet) -> Steps[bool]:
        r = ctx.r
        out = ParsedOutput(str, keep_gap=False, trim_before_tool=False)
        scratch = ParserContext(r, out, ctx.tools, begin_by=r.position + LOOKAHEAD_LIMIT)
        read = self.calls(scratch, "")
        while True:
            try:
                next(read)
            except StopIteration:
                break
            except Malformed:
                # A call that is not complete at the end is text.
                ctx.out.malformed += out.calls > 0 and r.ended and r.at == len(r.buf) and not r.is_cut
                return False
            if not out.calls and r.position > scratch.begin_by:
                return False
            yield
        while (yield from r.space()):
            if not (yield from r.literal(turn_ends)):
                return False
        return out.calls > 0 and not r.is_cut and _are_declared(out.drain(), ctx.tools)


def _are_declared(events: list[Event], tools: Tools) -> bool:
    """Return whether all events belong to calls of declared tools, with declared arguments where these are known."""
    calls: list[tuple[str, list[str]]] = []
    for event in events:
        if event.kind is DeltaKind.TOOL_BEGIN and event.tool:
            calls.append((event.tool.name, []))
        elif event.kind is DeltaKind.TOOL_ARGS and calls:
            calls[-1][1].append(event.text)
        elif event.kind is not DeltaKind.TOOL_END:
            return False
    return all(
        name in tools
        and (not (known := tools.parameters(name)).is_closed or json.loads("".join(parts)).keys() <= known.names.keys())
        for name, parts in calls
    )
