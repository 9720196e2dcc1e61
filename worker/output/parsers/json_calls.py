"""Calls as JSON objects with a name and arguments: Hermes, Llama 3, Mistral v3, Cohere, Granite, Hunyuan, xLAM."""

import json
from dataclasses import dataclass, field, replace
from typing import Final

from worker.output.parsers.call import (
    FENCE,
    FIELD_LEFT,
    NAME_LIMIT,
    ParserContext,
    begin,
    end,
    end_fence,
    fence,
    json_arguments,
    members,
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
