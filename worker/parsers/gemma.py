"""Calls as Gemma writes them: `call:name{key:<|"|>text<|"|>,other:1}` between special tokens."""

from dataclasses import dataclass

from worker.parsers.call import NAME_LIMIT, Context, begin, checked, end, members
from worker.parsers.literal import Dialect
from worker.parsers.reader import Malformed, Steps, markers


@dataclass(frozen=True, slots=True)
class GemmaCalls:
    starts: tuple[str, ...]
    ends: tuple[str, ...]
    dialect: Dialect

    def calls(self, ctx: Context, hit: str) -> Steps[None]:
        r = ctx.r
        while True:
            if (yield from r.space()) != "c":
                raise Malformed
            yield from r.expect(markers("call:"))
            name, _ = yield from r.capture(markers("{"), NAME_LIMIT)
            params = begin(ctx, checked(name))
            yield from members(ctx, params, ctx.out.args, self.dialect)
            end(ctx)
            char = yield from r.space()
            if char != "c":
                break
        yield from r.literal(markers(*self.ends))
