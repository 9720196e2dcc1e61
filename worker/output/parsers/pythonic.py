"""Calls in Python's notation, `[f(a=1), g(b='x')]`: Llama 4, LFM2, OLMo 3."""

import re
from dataclasses import dataclass

from worker.output.parsers.call import (
    ParserContext,
    begin,
    end,
    end_fence,
    expect_keywords,
    fence,
    members,
    read_name,
)
from worker.output.parsers.json_calls import JsonCalls
from worker.output.parsers.literal import LiteralSyntax
from worker.output.parsers.quotes import CallSyntax, follows_call, python_space
from worker.output.parsers.reader import Malformed, MarkupReader, Steps, markers

_NAME_START = re.compile(r"[^\W\d]")
# Matches the beginning of keyword arguments. Tools take no arguments without names.
_KEYWORDS = re.compile(r"\(\s*(?:\)|\w+\s*=[^=])")
_KEYWORDS_BEGUN = re.compile(r"\(\s*(?:\w+\s*=?)?")


@dataclass(frozen=True, slots=True)
class PythonCalls:
    """Notation of a list of calls: in brackets or, between markers, one call per line. With `bare`, the list is the
    whole message, and `ends` only end a broken call."""

    starts: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    bare: bool = False

    def calls(self, ctx: ParserContext, hit: str) -> Steps[None]:
        r = ctx.r
        # Text may begin with a heading, which is no comment.
        char = yield from r.space() if self.bare else python_space(r)
        if is_fenced := self.bare and (yield from fence(ctx, hit)):
            char = yield from python_space(r)
        yield from self._list(ctx, hit, char)
        if is_fenced:
            yield from end_fence(ctx)

    def _list(self, ctx: ParserContext, hit: str, char: str) -> Steps[None]:
        r = ctx.r
        is_list = char == "["
        if is_list:
            r.take(1)
            char = yield from python_space(r)
            if char == "]" and not self.bare:
                # The list contains no calls.
                yield from self._close(r)
                return
        elif self.bare and char != "{":
            raise Malformed
        if char == "{":
            # Some models with this notation were also trained on JSON calls.
            yield from JsonCalls((), self.ends, bare=self.bare).calls(ctx, "[" if is_list else hit)
            return
        while True:
            yield from self._one(ctx)
            char = yield from python_space(r)
            if char and char in ",;":
                r.take(1)
                char = yield from python_space(r)
            if not _NAME_START.match(char) or (self.bare and not is_list):
                break
            if self.bare and char == "]":
                break
        yield from self._close(r)

    def _close(self, r: MarkupReader) -> Steps[None]:
        yield from r.literal(markers("]"))
        if not self.bare:
            yield from r.space()
            yield from r.literal(markers(*self.ends))

    def _one(self, ctx: ParserContext) -> Steps[None]:
        name = yield from read_name(ctx.r)
        if (yield from ctx.r.peek()) != "(" or not _NAME_START.match(name):
            raise Malformed
        name = ctx.tools.declared(name)
        if self.bare and ctx.tools and name not in ctx.tools:
            raise Malformed
        yield from expect_keywords(ctx.r, _KEYWORDS, _KEYWORDS_BEGUN)
        params = begin(ctx, name)
        ctx.r.take(1)
        syntax = CallSyntax(ctx.tools, () if self.bare else self.ends)
        dialect = LiteralSyntax(python=syntax)
        yield from members(ctx, params, ctx.out.args, dialect, close=")", separator=markers("="))
        if not (yield from follows_call(ctx.r, syntax)):
            raise Malformed
        end(ctx)
