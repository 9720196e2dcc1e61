"""Calls in Gemma's notation: `call:name{key:<|"|>text<|"|>,other:1}` between special tokens."""

import re
from dataclasses import dataclass
from typing import Final

from worker.output.parsers.call import (
    NAME_LIMIT,
    ParserContext,
    begin,
    checked,
    end,
    expect_end,
    expect_keywords,
    members,
    refuse_continuation,
)
from worker.output.parsers.literal import LiteralSyntax
from worker.output.parsers.reader import Malformed, Steps, markers, stray
from worker.output.parsers.schema import Parameters

_WORDS: Final = markers("call:", "call ", "call\n")
# A bracket ends a name; `<` shows that there is no name.
_NAME_ENDS: Final = markers("{", "(", "\n", "<")
_SEPARATORS: Final = markers(":", "=")
# Matches the beginning of arguments in parentheses, which models write in long conversations (omlx#1886).
_KEYWORDS: Final = re.compile(r"\(\s*(?:[){]|\w[\w.\-]*\s*[:=])")
_KEYWORDS_BEGUN: Final = re.compile(r"\(\s*(?:\w[\w.\-]*\s*)?")


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
            yield from expect_keywords(r, _KEYWORDS, _KEYWORDS_BEGUN)
        return name
