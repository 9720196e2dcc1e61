"""Calls with literals as arguments, in the notations of Python and Gemma.

Calls in Python's notation, `[f(a=1), g(b='x')]`: Llama 4, LFM2, OLMo 3.

Calls in Gemma's notation: `call:name{key:<|"|>text<|"|>,other:1}` between special tokens.
"""

import re
from dataclasses import dataclass
from typing import Final

from worker.output.parsers.call import (
    NAME_LIMIT,
    ParserContext,
    begin,
    checked,
    end,
    end_fence,
    expect_end,
    expect_keywords,
    fence,
    members,
    read_name,
    refuse_continuation,
)
from worker.output.parsers.json_calls import JsonCalls
from worker.output.parsers.literal import LiteralSyntax
from worker.output.parsers.quotes import CallSyntax, follows_call, python_space
from worker.output.parsers.reader import Malformed, MarkupReader, Steps, markers, stray
from worker.output.parsers.schema import Parameters

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


_WORDS: Final = markers("call:", "call ", "call\n")
# A bracket ends a name; `<` shows that there is no name.
_NAME_ENDS: Final = markers("{", "(", "\n", "<")
_SEPARATORS: Final = markers(":", "=")
# Matches the beginning of arguments in parentheses, which models write in long conversations (omlx#1886).
_GEMMA_KEYWORDS: Final = re.compile(r"\(\s*(?:[){]|\w[\w.\-]*\s*[:=])")
_GEMMA_KEYWORDS_BEGUN: Final = re.compile(r"\(\s*(?:\w[\w.\-]*\s*)?")


@dataclass(frozen=True, slots=True)
class GemmaCalls:
    """Notation of one or more calls. After the marker, models may omit the word `call`, the colon or both.

    Arguments may be in parentheses, with `=` for `:`, and without commas. With `bare`, the marker itself is missing, so
    the word `call` and a declared name are required.
    """

    starts: tuple[str, ...]
    ends: tuple[str, ...]
    dialect: LiteralSyntax
    bare: bool = False

    def calls(self, ctx: ParserContext, hit: str) -> Steps[None]:
        r = ctx.r
        while True:
            name = yield from self._name(ctx)
            yield from self._arguments(ctx, begin(ctx, name))
            if self.bare:
                yield from refuse_continuation(r)
            else:
                yield from self._expect_next(ctx)
            end(ctx)
            if (yield from r.space()) != "c":
                break
        yield from r.literal(markers(*self.ends))

    def _expect_next(self, ctx: ParserContext) -> Steps[None]:
        """Read what follows a call up to the next one, or up to the markup that ends the calls."""
        r = ctx.r
        if (yield from r.space()) in (",", ";"):
            r.take(1)
            yield from r.space()
        if (yield from r.peek(len("call:"))) not in _WORDS.words:
            yield from expect_end(r)

    def _arguments(self, ctx: ParserContext, params: Parameters) -> Steps[None]:
        r, emit = ctx.r, ctx.out.args
        is_call = r.take(1) == "("
        if is_call and (yield from r.space()) != "{":
            dialect = self.dialect._replace(ends=self.dialect.ends + ")")
            yield from members(ctx, params, emit, dialect, ")", _SEPARATORS)
            return
        r.take(int(is_call))
        yield from members(ctx, params, emit, self.dialect, "}", _SEPARATORS)
        if is_call and (char := (yield from r.space())) != ")":
            raise stray(char)
        r.take(int(is_call))

    def _name(self, ctx: ParserContext) -> Steps[str]:
        """Read the name of the next call, up to its bracket."""
        r = ctx.r
        yield from r.space()
        yield from r.literal(markers(":"))
        has_word = yield from r.literal(_WORDS)
        yield from r.space()
        name, following = yield from r.capture(_NAME_ENDS, NAME_LIMIT, keep=True)
        name = ctx.tools.declared(checked(name))
        is_known = name in ctx.tools
        is_meant = (has_word and is_known) if self.bare else (has_word or is_known or not ctx.tools)
        if following == "\n" and has_word:
            following = yield from r.space()
        if following not in ("{", "(") or not is_meant:
            raise Malformed
        if following == "(":
            yield from expect_keywords(r, _GEMMA_KEYWORDS, _GEMMA_KEYWORDS_BEGUN)
        return name
