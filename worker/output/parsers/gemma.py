"""Calls in Gemma's notation: `call:name{key:<|"|>text<|"|>,other:1}` between special tokens."""

from dataclasses import dataclass
from typing import Final

from worker.output.parsers.call import NAME_LIMIT, ParserContext, begin, checked, end, members
from worker.output.parsers.literal import LiteralSyntax
from worker.output.parsers.reader import Malformed, Steps, markers

_WORDS: Final = markers("call:", "call ", "call\n")
# A brace ends a name; the other characters show that there is no name.
_NAME_ENDS: Final = markers("{", "\n", "<", "(")


@dataclass(frozen=True, slots=True)
class GemmaCalls:
    """Notation of one or more calls. After the marker, models may omit the word `call`, the colon or both.

    With `bare`, the marker itself is missing, so the word `call` and a declared name are required.
    """

    starts: tuple[str, ...]
    ends: tuple[str, ...]
    dialect: LiteralSyntax
    bare: bool = False

    def calls(self, ctx: ParserContext, hit: str) -> Steps[None]:
        r = ctx.r
        while True:
            params = begin(ctx, (yield from self._name(ctx)))
            r.take(1)
            yield from members(ctx, params, ctx.out.args, self.dialect)
            end(ctx)
            if (yield from r.space()) != "c":
                break
        yield from r.literal(markers(*self.ends))

    def _name(self, ctx: ParserContext) -> Steps[str]:
        """Read the name of the next call, up to its brace."""
        r = ctx.r
        yield from r.space()
        yield from r.literal(markers(":"))
        has_word = yield from r.literal(_WORDS)
        yield from r.space()
        name, following = yield from r.capture(_NAME_ENDS, NAME_LIMIT, keep=True)
        name = ctx.tools.declared(checked(name))
        is_known = name in ctx.tools
        is_meant = (has_word and is_known) if self.bare else (has_word or is_known or not ctx.tools)
        if following != "{" or not is_meant:
            raise Malformed
        return name
