"""Calls with JSON arguments: JSON objects with a name and arguments, or a name followed by the arguments.

Calls as JSON objects with a name and arguments: Hermes, Llama 3, Mistral v3, Cohere, Granite, Hunyuan, xLAM.

Llama 3's calls: a JSON object anywhere in the text or after `<|python_tag|>`, or `name.call(…)` after that tag.

Calls as a name, followed by the arguments as one JSON object: Mistral, Kimi K2, DeepSeek, Solar, Functionary.
"""

import json
import re
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

from worker.output.parsers.call import (
    FENCE,
    FIELD_LEFT,
    LOOKAHEAD_LIMIT,
    NAME_LIMIT,
    ParserContext,
    begin,
    checked,
    drop,
    end,
    end_fence,
    expect_end,
    fence,
    json_arguments,
    members,
    read_name,
    refuse_continuation,
)
from worker.output.parsers.literal import quoted, scalar, value
from worker.output.parsers.reader import Malformed, MarkupReader, Steps, collected, markers
from worker.output.parsers.schema import Parameters
from worker.output.parsers.xml_notation import all_spellings, cut_end, end_tag

NAME_KEYS: Final = frozenset({"name", "tool_name", "function_name", "function", "tool"})
ARGUMENT_KEYS: Final = frozenset({"arguments", "parameters", "args", "params", "input"})
_IDS: Final = frozenset({"id", "tool_call_id", "call_id"})
_EMPTY: Final = frozenset({"{}", "null", '""', '"{}"'})
_KNOWN: Final = NAME_KEYS | ARGUMENT_KEYS | _IDS | {"type"}


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """Notation of one object or a list of objects, after one of `starts`.

    With `bare`, the marker is part of ordinary JSON, so a known first key, both fields and a declared name are
    required. With `late`, the id follows the arguments, so a call is announced at its end. With `keyed`, objects are
    `{name: arguments}`.
    """

    starts: tuple[str, ...]
    ends: tuple[str, ...] = ()
    bare: bool = False
    late: bool = False
    keyed: bool = False

    def calls(self, ctx: ParserContext, hit: str) -> Steps[None]:
        r, ctx.awaited = ctx.r, self.ends
        is_open, is_list, is_first = hit == "{", hit.endswith("["), True
        is_fenced = hit == FENCE and (yield from fence(ctx, hit))
        while True:
            char = "{" if is_open else (yield from r.space())
            if char == "{":
                r.take(0 if is_open else 1)
                try:
                    yield from self._object(ctx)
                except Malformed:
                    # The object may be further arguments of the call before it.
                    ctx.out.is_broken |= not (is_first or self.bare)
                    raise
                is_open = is_first = False
            elif char == "[" and is_first and not is_list:
                r.take(1)
                is_list = True
            elif char == "`" and is_first and not is_fenced and (yield from fence(ctx, "")):
                is_fenced = True
            elif char == "]" and is_list and not (is_first and self.bare):
                r.take(1)
                break
            elif char and char in ",;" and not is_first:
                r.take(1)
                if (yield from r.space()) not in ("{", "]", "") and not (yield from self._is_end(r)):
                    ctx.out.text(r.untrace())
                    return
            elif is_first:
                raise Malformed
            else:
                if char in ("'", '"') and not self.bare:
                    ctx.out.mark_incomplete()  # a further argument, without its comma
                break
        if is_fenced:
            yield from end_fence(ctx)
        yield from self._close(ctx)

    def _is_end(self, r: MarkupReader) -> Steps[bool]:
        return bool((yield from r.ahead(end_tag(r, self._spelled_ends), NAME_LIMIT)))

    @property
    def _spelled_ends(self) -> tuple[str, ...]:
        return tuple(text for end in self.ends for text in all_spellings(end))

    def _close(self, ctx: ParserContext) -> Steps[None]:
        if not self.ends:
            return
        while True:
            char = yield from ctx.r.space()
            if (yield from cut_end(ctx.r, self.ends, ())) or (yield from end_tag(ctx.r, self._spelled_ends)):
                ctx.awaited = ()
                return
            if not char or char not in "]})`":
                return
            ctx.r.take(1)

    def _object(self, ctx: ParserContext) -> Steps[None]:
        """Read one call, after its `{`."""
        r, depth, call = ctx.r, 1, _CallState()
        is_first = True
        while depth:
            char = yield from r.space()
            if char == "," and not is_first:
                r.take(1)
                char = yield from r.space()
            if char == "}":
                r.take(1)
                depth -= 1
                continue
            if call.is_announced and char not in ("'", '"'):
                break  # the object must end here; only closing braces may follow
            key = yield from _key(ctx, char)
            if self.keyed and not call.is_announced:
                yield from json_arguments(ctx, begin(ctx, key))
                call.is_announced = True
            elif is_first and self.bare and key not in _KNOWN:
                raise Malformed
            elif key == "function" and (yield from r.space()) == "{":
                r.take(1)
                depth += 1
            else:
                yield from self._field(ctx, key, call)
            is_first = False
        if not call.is_announced:
            if call.arguments is None and call.others:
                yield from self._flat(ctx, call)
            self._announce(ctx, call)
            ctx.out.args(call.arguments or "{}")
        yield from refuse_continuation(r, FIELD_LEFT)
        end(ctx)

    def _flat(self, ctx: ParserContext, call: "_CallState") -> Steps[None]:
        """Read arguments that stand beside the name. Fields that are no parameters of the tool make the call
        malformed, because their values would be lost.
        """
        params = self._params(ctx, call)
        fields = {key: text for key, text in call.others.items() if key in params.names or key not in _KNOWN}
        if fields and (self.bare or (params.names and not fields.keys() <= params.names.keys())):
            raise Malformed
        r = MarkupReader()
        r.push(", ".join(f"{quoted(key)}: {text}" for key, text in fields.items()) + "}")
        r.ended = True
        call.arguments = yield from collected(lambda emit: members(replace(ctx, r=r), params, emit))
        call.others.clear()

    def _field(self, ctx: ParserContext, key: str, call: "_CallState") -> Steps[None]:
        char = yield from ctx.r.space()
        is_open = call.arguments is None and not call.is_announced
        # Arguments beside the name may have the name of a field.
        is_parameter = bool(call.name) and is_open and key in self._params(ctx, call).names
        if key in ARGUMENT_KEYS and is_open and not (is_parameter and char != "{"):
            if char == "{" and call.name and not self.late:
                self._announce(ctx, call, has_arguments=True)
                ctx.r.take(1)
                yield from members(ctx, ctx.tools.parameters(call.name), ctx.out.args)
                return
            # Arguments cannot be streamed if they come before the name or inside a string.
            params = ctx.tools.parameters(call.name)
            call.arguments = yield from collected(lambda emit: json_arguments(ctx, params, emit))
            return
        text = yield from collected(lambda emit: value(ctx.r, emit))
        if key in NAME_KEYS and text.startswith('"'):
            name = ctx.tools.declared(json.loads(text).strip())
            is_parameter = is_parameter and name != call.name
            if not is_parameter and (
                call.name not in ("", name) or (self.bare and ctx.tools and name not in ctx.tools)
            ):
                raise Malformed
            call.name = call.name or name
        elif key in _IDS and text not in ('""', "null") and text[0] not in "[{":
            call.call_id = json.loads(text) if text.startswith('"') else text
        if key in ARGUMENT_KEYS and text not in _EMPTY and not is_parameter:
            raise Malformed  # these are second arguments, of which a client would get only the first
        if key in (NAME_KEYS | ARGUMENT_KEYS) and not is_parameter:
            return
        call.others[key] = text
        if call.is_announced and key not in _KNOWN and key in self._params(ctx, call).names:
            ctx.out.mark_incomplete()  # the arguments have ended without this one

    def _params(self, ctx: ParserContext, call: "_CallState") -> Parameters:
        return ctx.tools.parameters(ctx.tools.declared(call.name))

    def _announce(self, ctx: ParserContext, call: "_CallState", has_arguments: bool = False) -> None:
        if self.bare and not (has_arguments or call.arguments):
            raise Malformed
        if self.bare and ctx.tools and call.name not in ctx.tools:
            raise Malformed
        if not self._params(ctx, call).names.keys().isdisjoint(call.others.keys() - _KNOWN):
            raise Malformed
        begin(ctx, call.name, call.call_id)
        call.is_announced = True


@dataclass(slots=True)
class _CallState:
    """State of the call that is being read."""

    name: str = ""
    call_id: str = ""
    arguments: str | None = None
    is_announced: bool = False
    # Fields that no notation of calls has.
    others: dict[str, str] = field(default_factory=dict[str, str])


def _key(ctx: ParserContext, char: str) -> Steps[str]:
    if char not in ("'", '"'):
        raise Malformed
    key = yield from collected(lambda emit: scalar(ctx.r, char, emit))
    yield from ctx.r.expect(markers(":"))
    return json.loads(key)


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
