"""Outer grammar of most models: text with reasoning and calls between markers.

Calls without the markers of their format: JSON, or a declared name and its arguments as JSON.
"""

import json
import re
import sys
from dataclasses import dataclass
from typing import Final, Literal

from protocol.from_worker import DeltaKind
from worker.output.parsers.call import (
    FENCE,
    LOOKAHEAD_LIMIT,
    CallFormat,
    ParserContext,
    attempt,
    begin,
    end,
    end_fence,
    fence,
    is_marker,
    json_arguments,
    read_calls,
)
from worker.output.parsers.events import Event, ParsedOutput
from worker.output.parsers.json_calls import JsonCalls
from worker.output.parsers.reader import REPEAT_LIMIT, Malformed, MarkerSet, Steps, markers
from worker.output.parsers.schema import Tools
from worker.output.parsers.xml_notation import XmlNotation, restyled, spaced


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


# Maximum number of searches for a last call that begin in searched text. Each may cost as much as the whole text.
_SEARCHES_MAX: Final = 4
# Matches the language of a block of code, and the whitespace behind it.
_FENCE_LABEL: Final = re.compile(r"[\w+\-]*\s*")
# Markers of the end of a turn that are plain text in some vocabularies. They could be a user's own markup, so they
# count only directly after a block.
_PLAIN_END: Final = ("</s>", "<eos>", "<sep>", "</assistant>", "<end_of_sentence>")
# Markers of the end of a turn, in case the tokenizer does not remove them. They are markup only at the very end.
_END_OF_TURN: Final = (
    *_PLAIN_END, "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>", "<|end|>", "<turn|>",
    "<end_of_turn>", "<|eot|>", "<|end_of_msg|>", "<|role_end|>", "<｜end▁of▁sentence｜>", "[e~[", "<seed:eos>",
    "<|END_OF_TURN_TOKEN|>", "<|return|>", "<|user|>", "<|observation|>", "<SPECIAL_12>", "<｜hy_eos｜>",
    "<｜hy_eos:opensource｜>",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Think:
    """Markup of reasoning. `prefix` is a line that may follow the start marker and belongs to the markup.

    With `is_explicit`, the model always writes the start marker itself, so an end marker without a start has no
    meaning.
    """

    starts: tuple[str, ...]
    ends: tuple[str, ...]
    prefix: str = ""
    is_explicit: bool = False


@dataclass(frozen=True, slots=True)
class MarkupGrammar:
    """Markup of a family. `drop` is markup without meaning; `opening` is a call format that is tried where content
    begins.

    `tool_ends_think` says when a call inside reasoning ends the reasoning: `always`, at the beginning of a `line`, or
    `last`: only a whole call to a declared tool with which the output ends, as it does in each case. Other calls are
    part of the reasoning.
    """

    formats: tuple[CallFormat, ...] = ()
    think: Think | None = None
    drop: tuple[str, ...] = ()
    opening: CallFormat | None = None
    tool_ends_think: Literal["always", "line", "last"] = "last"


@dataclass(frozen=True, slots=True)
class Verbatim:
    """Markup that only ends reasoning, and stays in the content."""

    starts: tuple[str, ...]
    ends: tuple[str, ...] = ()

    def calls(self, ctx: ParserContext, hit: str) -> Steps[None]:
        yield from ()
        ctx.out.end_reasoning(keep_space=True)
        ctx.out.text(hit)


class Conversation:
    """Parser of one output."""

    def __init__(self, ctx: ParserContext, grammar: MarkupGrammar) -> None:
        self._ctx = ctx
        self._grammar = grammar
        self._by_start = {start: form for form in grammar.formats for start in form.starts}
        self._starts, self._ends = (grammar.think.starts, grammar.think.ends) if grammar.think else ((), ())
        self._value_ends = [form.param_end for form in grammar.formats if isinstance(form, XmlNotation)]
        # Only a tag is certainly the end of a call.
        self._call_ends = [end for form in grammar.formats for end in form.ends if end.startswith("<")]
        # Starts and ends of calls by their other spellings.
        self._tags = {text: tag for tag in (*self._by_start, *self._call_ends) for text in self._spellings(tag)}
        is_marked = bool(self._by_start) and all(map(self._is_call_marker, self._by_start))
        has_unmarked = is_marked and bool(ctx.tools) and not grammar.opening
        self._unmarked = UnmarkedCalls(tuple(self._call_ends)) if has_unmarked else None
        has_fences = is_marked and not any(FENCE in start for start in self._by_start)
        # Whether the fence around the calls so far is not ended yet.
        self._is_fenced = False
        self._content = markers(
            *self._starts, *self._ends, *grammar.drop, *self._by_start, *self._value_ends, *self._call_ends,
            *self._tags, *_END_OF_TURN, *((FENCE,) if has_fences else ()),
        )  # fmt: skip
        calls = self._by_start if ctx.tools or grammar.tool_ends_think != "last" else ()
        spelled = [text for text, tag in self._tags.items() if tag in calls]
        self._reasoning = markers(*self._starts, *self._ends, *calls, *spelled)
        self._after_call = markers(*grammar.drop, *calls, *self._call_ends, *self._tags, *_END_OF_TURN)
        # Up to where the text was searched for a last call in vain, and how often text before that may be searched.
        self._searched, self._searches_left = 0, _SEARCHES_MAX

    def _is_call_marker(self, start: str) -> bool:
        return is_marker(start) and not isinstance(self._by_start.get(start), Verbatim)

    def _spellings(self, tag: str) -> list[str]:
        """Return the other spellings of a tag around calls. A token has none."""
        is_tag = tag.startswith("<") and tag.endswith((">", "=")) and self._is_call_marker(tag)
        if not is_tag or self._ctx.r.controls.offsets(tag):
            return []
        texts = restyled(tag)
        return [*texts, *(text for each in (tag, *texts) for text in spaced(each))]

    def read(self, in_reasoning: bool) -> Steps[None]:
        """Parse the whole output. `in_reasoning` means that the prompt has opened the reasoning block."""
        if in_reasoning and self._grammar.think:
            yield from self._read_reasoning()
        yield from self._open()
        ctx, out = self._ctx, self._ctx.out
        while written := (yield from ctx.r.until(self._content, self._text)):
            hit = self._tags.get(written, written)
            if form := self._by_start.get(hit):
                yield from attempt(ctx, form, hit, out.text, written)
            elif hit == FENCE:
                yield from self._fence()
            elif out.calls and hit in ctx.awaited:
                ctx.awaited = ()
                out.close_section()
            elif out.calls and out.is_blank and hit in (*self._value_ends, *self._call_ends):
                out.close_section()  # an end that is written again
            elif hit in self._value_ends:
                out.text(hit)
                if out.calls:
                    # A value of the last call held the markers of the call's end, and was cut there.
                    out.mark_incomplete()
            elif hit in self._starts:
                if out.is_line_start or self._is_special(hit):
                    yield from self._read_reasoning()
                    yield from self._open()
                else:
                    out.text(hit)
            elif hit in self._ends:
                # An end marker without a start is ordinary text if it comes after other text.
                if out.is_blank:
                    out.end_reasoning()
                elif not self._is_special(hit):
                    out.text(hit)
            elif hit in self._grammar.drop:
                out.close_section()
            elif hit not in _END_OF_TURN or (hit in _PLAIN_END and not out.is_blank):
                out.text(written)
            else:
                yield from self._end_of_turn(hit)

    def _text(self, text: str) -> None:
        """Add content. The beginning of an end marker behind a call, with which the output ends, is none."""
        r, out = self._ctx.r, self._ctx.out
        if out.calls and r.ended and r.at == len(r.buf):
            at = markers(*self._call_ends, *self._grammar.drop).held(text, 0)
            is_awaited = any(end.startswith(text[at:]) for end in self._ctx.awaited)
            if len(text) - at > 1 and (is_awaited or (out.is_blank and not text[:at].strip())):
                text = text[:at].rstrip()
        out.text(text)

    def _fence(self) -> Steps[None]:
        """Read what follows a fence, which is no content around calls."""
        ctx, out = self._ctx, self._ctx.out
        is_line = out.is_line_start or out.is_blank
        if is_line and self._is_fenced and ((yield from ctx.r.peek()) or "\n").isspace():
            self._is_fenced = False
            out.close_section()
            return
        label = None
        if is_line and not ctx.in_code:
            label = yield from ctx.r.ahead(self._fence_label(), REPEAT_LIMIT)
        if label is None:
            ctx.in_code ^= is_line
            out.text(FENCE)
            return
        before, rejected = FENCE + ctx.r.take(len(label)), list[str]()
        written = yield from ctx.r.literal(markers(*self._by_start, *self._tags))
        hit = self._tags.get(written, written)
        yield from attempt(ctx, self._by_start[hit], hit, rejected.append, written)
        if rejected:
            out.text(before + "".join(rejected))
        self._is_fenced, ctx.in_code = not rejected, bool(rejected)

    def _fence_label(self) -> Steps[str]:
        """Return the text between a fence and the start of a call on the next line. Raises `Malformed`."""
        r = self._ctx.r
        while True:
            label = _FENCE_LABEL.match(r.buf, r.at, r.at + REPEAT_LIMIT)
            size = len(label[0]) if label else 0
            if r.at + size < len(r.buf) or r.ended or size == REPEAT_LIMIT:
                break
            yield
        text = r.take(size)
        hit = yield from r.literal(markers(*self._by_start, *self._tags))
        if self._tags.get(hit, hit) not in self._by_start:
            raise Malformed
        return text

    def _end_of_turn(self, hit: str) -> Steps[None]:
        """Drop the marker if only further end markers follow; otherwise it is text."""
        r, first = self._ctx.r, hit
        r.trace = []
        while hit:
            if not (yield from r.space()):
                r.trace = None
                return
            hit = yield from r.literal(markers(*_END_OF_TURN))
        self._ctx.out.text(first + r.untrace())

    def _open(self) -> Steps[None]:
        ctx = self._ctx
        if self._grammar.opening:
            yield from attempt(ctx, self._grammar.opening, "", ctx.out.text)
        elif self._unmarked and (yield from self._unmarked.are_all(ctx, markers(*_END_OF_TURN))):
            yield from attempt(ctx, self._unmarked, "", ctx.out.text)

    def _read_reasoning(self) -> Steps[None]:
        ctx, out = self._ctx, self._ctx.out
        out.open_reasoning()
        yield from self._prefix()
        while written := (yield from ctx.r.until(self._reasoning, out.reasoning)):
            hit = self._tags.get(written, written)
            if hit in self._ends:
                break
            if hit in self._starts:
                # The model may repeat the marker that the prompt has written.
                if not out.in_reasoning or out.is_blank:
                    yield from self._prefix()
                else:
                    out.reasoning(hit)
            elif not (yield from self._may_end_reasoning(hit)):
                out.reasoning(written)
            elif (yield from attempt(ctx, self._by_start[hit], hit, out.reasoning, written)):
                return
            elif not out.in_reasoning:
                return  # `Verbatim` has ended the block
        out.end_reasoning()

    def _may_end_reasoning(self, hit: str) -> Steps[bool]:
        """Return whether a call that begins with `hit` would end the reasoning."""
        if self._grammar.tool_ends_think == "last":
            return (yield from self._is_last_call(hit))
        is_inside = self._ctx.out.in_reasoning and not self._ctx.out.is_line_start
        if self._grammar.tool_ends_think == "always" or not is_inside:
            return True
        return (yield from self._is_call_inline(hit)) or (yield from self._is_last_call(hit))

    def _is_last_call(self, hit: str) -> Steps[bool]:
        """Look ahead and return whether the output ends with whole calls to declared tools, the first begun by `hit`.

        Many models forget to end their reasoning before a call (vllm#35687); without the call, the turn would be empty.
        """
        r = self._ctx.r
        if r.position <= self._searched:
            if not self._searches_left:
                return False
            self._searches_left -= 1
        return bool((yield from r.ahead(self._read_last_calls(hit), sys.maxsize)))

    def _read_last_calls(self, hit: str) -> Steps[bool]:
        r, tools = self._ctx.r, self._ctx.tools
        scratch = ParserContext(r, ParsedOutput(str, keep_gap=False, trim_before_tool=False), tools)
        try:
            while hit:
                if form := self._by_start.get(hit):
                    yield from read_calls(scratch, form, hit)
                begun = [event.tool for event in scratch.out.drain() if event.kind is DeltaKind.TOOL_BEGIN]
                if not all(tool and tool.name in tools for tool in begun):
                    return False
                yield from r.space()
                hit = yield from r.literal(self._after_call)
                hit = self._tags.get(hit, hit)
            is_over = not (yield from r.peek()) and not r.is_cut
            return is_over and scratch.out.calls > 0 and not scratch.out.is_broken
        finally:
            self._searched = max(self._searched, r.position)

    def _is_call_inline(self, hit: str) -> Steps[bool]:
        """Return whether a call begins with `hit` within a line of reasoning. A wrapper does, if the call in it begins
        a line or is complete up to its first parameter, and calls a declared tool.
        """
        form = self._by_start[hit]
        if not isinstance(form, XmlNotation) or hit not in form.wrap:
            return False
        return bool((yield from self._ctx.r.ahead(form.follows_wrapper(self._ctx), LOOKAHEAD_LIMIT)))

    def _prefix(self) -> Steps[None]:
        if self._grammar.think and (prefix := self._grammar.think.prefix):
            text = yield from self._ctx.r.peek(len(prefix) + 1)
            # The prefix may lack its line break if the reasoning is empty.
            if text == prefix or (text.startswith(prefix) and text[-1] in "\r\n<"):
                self._ctx.r.take(len(prefix))

    def _is_special(self, marker: str) -> bool:
        """Return whether only a model's special token has this spelling, so that it cannot be ordinary text."""
        return "|" in marker or "｜" in marker or marker.startswith("[") or self._ctx.r.controls.are_special(marker)
