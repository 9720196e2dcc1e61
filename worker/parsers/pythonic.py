"""Calls as Python writes them, `[f(a=1), g(b='x')]`: Llama 4, LFM2, OLMo 3."""

import re
from dataclasses import dataclass

from worker.parsers.call import NAME_LIMIT, Context, begin, end, members
from worker.parsers.json_calls import JsonCalls
from worker.parsers.reader import Malformed, Reader, Steps, markers

_NAME_PART = re.compile(r"[\w.\-]+")


@dataclass(frozen=True, slots=True)
class PythonCalls:
    """A list of calls, in brackets or, between markers, one a line. `bare`: it is the whole message."""

    starts: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    bare: bool = False

    def calls(self, ctx: Context, hit: str) -> Steps[None]:
        r = ctx.r
        char = yield from r.space()
        is_list = char == "["
        if is_list:
            r.take(1)
            char = yield from r.space()
        elif self.bare:
            raise Malformed
        if char == "{" and hit:
            yield from JsonCalls((hit + "[" if is_list else hit,), self.ends).calls(ctx, "[" if is_list else hit)
            return
        while True:
            yield from self._one(ctx)
            char = yield from r.space()
            if char and char in ",;":
                r.take(1)
                char = yield from r.space()
            if not _NAME_PART.match(char) or (self.bare and not is_list):
                break
            if self.bare and char == "]":
                break
        yield from r.literal(markers("]"))
        if self.ends:
            yield from r.space()
            yield from r.literal(markers(*self.ends))

    def _one(self, ctx: Context) -> Steps[None]:
        name = yield from _name(ctx.r)
        if (yield from ctx.r.peek()) != "(" or name[0].isdigit():
            raise Malformed
        if self.bare and ctx.tools and name not in ctx.tools:
            raise Malformed
        params = begin(ctx, name)
        ctx.r.take(1)
        yield from members(ctx, params, ctx.out.args, close=")", separator=markers("="))
        end(ctx)


def _name(r: Reader) -> Steps[str]:
    parts: list[str] = []
    size = 0
    while size <= NAME_LIMIT:
        found = _NAME_PART.match(r.buf, r.at)
        if found:
            size += len(found[0])
            parts.append(r.take(len(found[0])))
        if r.at < len(r.buf) or r.ended:
            break
        yield
    if not parts:
        raise Malformed
    return "".join(parts)
