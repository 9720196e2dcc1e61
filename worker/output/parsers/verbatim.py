"""Markup that only ends reasoning, and stays in the content."""

from dataclasses import dataclass

from worker.output.parsers.call import ParserContext
from worker.output.parsers.reader import Steps


@dataclass(frozen=True, slots=True)
class Verbatim:
    starts: tuple[str, ...]
    ends: tuple[str, ...] = ()

    def calls(self, ctx: ParserContext, hit: str) -> Steps[None]:
        yield from ()
        ctx.out.end_reasoning(keep_space=True)
        ctx.out.text(hit)
