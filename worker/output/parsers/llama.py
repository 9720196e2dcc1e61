"""Llama 3's calls: a JSON object anywhere in the text or after `<|python_tag|>`, or `name.call(…)` after that tag."""

import re
from dataclasses import dataclass
from typing import Final

from worker.output.parsers.call import (
    FENCE,
    NAME_LIMIT,
    ParserContext,
    begin,
    checked,
    end,
    members,
    refuse_continuation,
)
from worker.output.parsers.json_calls import JsonCalls
from worker.output.parsers.literal import quoted
from worker.output.parsers.reader import Malformed, Steps, markers

# Matches what follows a call on its line, which may be a part of its arguments, as group 1.
_LINE_LEFT: Final = re.compile(r"[^\S\n]*([^\s<])?")
_JSON: Final = JsonCalls((), bare=True)


@dataclass(frozen=True, slots=True)
class LlamaCalls:
    """Notation of Llama 3. Other text after `<|python_tag|>` is code for a declared `python` or `code_interpreter`."""

    starts: tuple[str, ...] = ("<|python_tag|>", "functools[", FENCE, "{", "[")
    ends: tuple[str, ...] = ()

    def calls(self, ctx: ParserContext, hit: str) -> Steps[None]:
        r = ctx.r
        if hit != "<|python_tag|>" or (yield from r.space()) in ("{", "[", "`"):
            yield from _JSON.calls(ctx, hit)
            return
        code = next((name for name in ("python", "code_interpreter", "ipython") if name in ctx.tools), "")
        parts: list[str] = []
        word = yield from r.until(markers(".call(", "\n"), parts.append, NAME_LIMIT, keep=not code)
        if word == ".call(":
            yield from r.literal(markers(".call("))
            params = begin(ctx, checked("".join(parts)))
            yield from members(ctx, params, ctx.out.args, close=")", separator=markers("="))
            yield from refuse_continuation(r, _LINE_LEFT)
            end(ctx)
            return
        if not code:
            raise Malformed
        parts.append(word)
        yield from r.until(markers(), parts.append)
        if not "".join(parts).strip():
            raise Malformed
        begin(ctx, code)
        ctx.out.args('{"code": ' + quoted("".join(parts))[: -1 if r.is_cut else None])
        if r.is_cut:
            raise Malformed  # a part of the code is missing
        ctx.out.args("}")
        end(ctx)
