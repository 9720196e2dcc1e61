"""Calls as a name, followed by the arguments as one JSON object: Mistral, Kimi K2, DeepSeek, Solar, Functionary."""

import json
from dataclasses import dataclass
from typing import Any, Final, cast

from worker.output.parsers.call import (
    LOOKAHEAD_LIMIT,
    NAME_LIMIT,
    ParserContext,
    begin,
    checked,
    drop,
    end,
    expect_end,
    json_arguments,
    read_name,
    refuse_continuation,
)
from worker.output.parsers.json_calls import ARGUMENT_KEYS, NAME_KEYS, JsonCalls
from worker.output.parsers.reader import Malformed, MarkupReader, Steps, markers
from worker.output.parsers.schema import Parameters
from worker.output.parsers.xml_notation import end_tag


@dataclass(frozen=True, slots=True)
class MistralCalls:
    """Notation `[TOOL_CALLS]name[CALL_ID]id[ARGS]{…}`, or the older JSON list."""

    starts: tuple[str, ...] = ("[TOOL_CALLS]",)
    ends: tuple[str, ...] = ()

    def calls(self, ctx: ParserContext, hit: str) -> Steps[None]:
        r = ctx.r
        if (yield from r.space()) in ("[", "{"):
            yield from _MISTRAL_LIST.calls(ctx, hit)
            return
        while True:
            yield from self._one(ctx)
            yield from r.space()
            if (yield from r.literal(markers(*self.starts))):
                yield from r.again(markers(*self.starts))
            elif not (yield from r.ahead(self._is_next(ctx), NAME_LIMIT)):
                return

    def _one(self, ctx: ParserContext) -> Steps[None]:
        r, arguments = ctx.r, markers("[ARGS]")
        name, hit = yield from r.capture(markers("[ARGS]", "[CALL_ID]", "{", *self.starts), NAME_LIMIT, keep=True)
        name, call_id = ctx.tools.declared(checked(name)), ""
        is_empty = hit in self.starts
        if is_empty and name not in ctx.tools:
            raise Malformed
        if (yield from r.literal(markers("[ARGS]", "[CALL_ID]"))) == "[CALL_ID]":
            # The id must not extend into the arguments or the next call.
            call_id, hit = yield from r.capture(markers("[ARGS]", "{", *self.starts), NAME_LIMIT, keep=True)
            if hit in self.starts:
                raise Malformed
            yield from r.literal(arguments)
        yield from r.again(arguments)
        params = begin(ctx, name, call_id.strip())
        if not (yield from r.space()):
            is_empty = name in ctx.tools and not params.names and not r.is_cut
        if is_empty or (yield from r.until(markers(*self.starts), drop, 0, keep=True)):
            ctx.out.args("{}")
        else:
            yield from json_arguments(ctx, params)
            yield from refuse_continuation(r)
        end(ctx)

    def _is_next(self, ctx: ParserContext) -> Steps[bool]:
        """Return whether a call to a declared tool follows without a start marker."""
        name, _ = yield from ctx.r.capture(markers("[ARGS]", "[CALL_ID]"), NAME_LIMIT)
        return ctx.tools.declared(checked(name)) in ctx.tools


_MISTRAL_LIST: Final = JsonCalls(("[TOOL_CALLS]",), late=True)


@dataclass(frozen=True, slots=True)
class SectionCalls:
    """Notation of a section of calls, each `begin header sep arguments end`; a marker may have several spellings.

    The header is `functions.name:index` (Kimi K2, which uses it as the id, too) or a name (DeepSeek V3.1). In DeepSeek
    V3 it is the call's type, followed by the name and a fenced block. With `id_separator` it consists of the id, the
    separator and the name.
    """

    section: tuple[str, ...]
    call: tuple[str, ...]
    separator: tuple[str, ...]
    call_end: tuple[str, ...]
    section_end: tuple[str, ...]
    id_separator: str = ""

    @property
    def starts(self) -> tuple[str, ...]:
        return self.section + self.call

    @property
    def ends(self) -> tuple[str, ...]:
        return self.call_end + self.section_end

    def calls(self, ctx: ParserContext, hit: str) -> Steps[None]:
        r, call = ctx.r, markers(*self.call)
        if hit in self.section:
            ctx.awaited = self.section_end
            text = yield from r.ahead(self._prose(ctx), LOOKAHEAD_LIMIT)
            if text and text.strip():
                ctx.out.text(r.take(len(text)))
                r.trace = []
            yield from r.space()
            if (yield from r.literal(markers(*self.section_end))):
                return
            # The outer marker may be followed by the first call without an inner marker.
            yield from r.literal(call)
        while True:
            yield from self._one(ctx)
            for closing in (("```",), self.call_end, ()):
                yield from r.space()
                yield from r.literal(markers(*closing))
            yield from r.again(markers(*self.call_end))
            yield from r.space()
            if not (yield from r.literal(call)):
                if (yield from r.literal(markers(*self.section_end))):
                    ctx.awaited = ()
                return

    def _prose(self, ctx: ParserContext) -> Steps[str]:
        """Return the text between the start of a section and the first whole head of a call. Raises `Malformed`."""
        known = markers(*self.call, *self.separator, *self.ends, *self.section)
        text, first = yield from ctx.r.capture(known)
        _, second = yield from ctx.r.capture(known, NAME_LIMIT)
        if first not in self.call or second not in (*self.separator, *self.call):
            raise Malformed
        return text

    def _one(self, ctx: ParserContext) -> Steps[None]:
        r = ctx.r
        yield from r.again(markers(*self.call))
        # The header must not extend beyond the end of a broken call.
        header, hit = yield from r.capture(markers(*self.separator, *self.call, *self.ends), NAME_LIMIT, keep=True)
        if hit not in self.separator:
            raise Malformed
        yield from r.literal(markers(hit))
        yield from r.again(markers(*self.separator))
        header = header.strip()
        call_id = ""
        if self.id_separator:
            call_id, _, header = header.rpartition(self.id_separator)
        elif ":" in header:
            call_id = header
        if (yield from r.space()) not in ("{", '"'):
            if (yield from r.until(markers(*self.ends, *self.call), drop, 0, keep=True)):
                begin(ctx, self._name(header, call_id), call_id)
                ctx.out.args("{}")
                end(ctx)
                return
            header, _ = yield from r.capture(markers("\n", "{"), NAME_LIMIT, keep=True)
            yield from r.space()
            yield from r.literal(markers("```json"))
        name = ctx.tools.declared(self._name(header, call_id))
        if ctx.tools and name not in ctx.tools:
            yield from _undeclared(ctx, name, call_id)
        else:
            # A header that is not just the name is the call's id: Kimi K2's template writes it in the next prompt.
            yield from json_arguments(ctx, begin(ctx, name, call_id or ("" if header.strip() == name else header)))
        yield from expect_end(r)
        end(ctx)

    def _name(self, header: str, call_id: str) -> str:
        name = header.strip().removeprefix("functions.")
        return checked(name.rpartition(":")[0] or name if call_id and not self.id_separator else name)


def _undeclared(ctx: ParserContext, name: str, call_id: str) -> Steps[None]:
    """Read the arguments of a tool that is not declared. They are those of a declared one if they name it: Kimi K2
    writes a made-up id in place of the name, and the name among the arguments (vllm#32146).
    """
    parts: list[str] = []
    try:
        yield from json_arguments(ctx, Parameters({}), parts.append)
    except Malformed:
        begin(ctx, name, call_id)
        ctx.out.args("".join(parts))
        raise
    written: dict[str, Any] = json.loads("".join(parts))
    inner = [key for key in NAME_KEYS if isinstance(written.get(key), str)]
    inner_name = ctx.tools.declared(written[inner[0]]) if len(inner) == 1 else ""
    if inner_name not in ctx.tools:
        begin(ctx, name, call_id)
        ctx.out.args("".join(parts))
        return
    del written[inner[0]]
    params = begin(ctx, inner_name, call_id or name)
    match list(written.items()):
        case [(key, dict() as arguments)] if key in ARGUMENT_KEYS and key not in params.names:
            written = cast("dict[str, Any]", arguments)
        case _:
            pass
    r = MarkupReader()
    r.push(json.dumps(written))
    r.ended = True
    yield from json_arguments(ParserContext(r, ctx.out, ctx.tools), params)


@dataclass(frozen=True, slots=True)
class TaggedJson:
    """Notation `<function=name>{…}</function>` (Functionary v3.1)."""

    starts: tuple[str, ...] = ("<function=",)
    ends: tuple[str, ...] = ("</function>",)

    def calls(self, ctx: ParserContext, hit: str) -> Steps[None]:
        name, _ = yield from ctx.r.capture(markers(">"), NAME_LIMIT)
        if (yield from ctx.r.space()) not in ("{", '"'):
            raise Malformed
        yield from json_arguments(ctx, begin(ctx, checked(name)))
        yield from expect_end(ctx.r)
        end(ctx)
        yield from end_tag(ctx.r, self.ends)


@dataclass(frozen=True, slots=True)
class RecipientJson:
    """Notation `>>>name`, a line break and arguments (Functionary v3.2); the recipient `all` is content."""

    starts: tuple[str, ...] = (">>>",)
    ends: tuple[str, ...] = ()

    def calls(self, ctx: ParserContext, hit: str) -> Steps[None]:
        name = yield from read_name(ctx.r)
        if not (yield from ctx.r.literal(markers("\n"))):
            raise Malformed
        if name == "all":
            return
        if (yield from ctx.r.space()) != "{":
            raise Malformed
        yield from json_arguments(ctx, begin(ctx, name))
        yield from refuse_continuation(ctx.r)
        end(ctx)
