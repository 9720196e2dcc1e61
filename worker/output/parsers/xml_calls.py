"""Calls as tags around plain text: Qwen3-Coder, GLM, MiniMax, DeepSeek V3.2, Seed, MiniCPM, Kimi K3, Muse and more."""

from dataclasses import dataclass, field
from typing import Final

from worker.output.parsers.call import LOOKAHEAD_LIMIT, ParserContext, begin, end, json_arguments
from worker.output.parsers.json_calls import JsonCalls
from worker.output.parsers.literal import escaped, quoted
from worker.output.parsers.reader import Malformed, Steps, Unclosed, collected, markers
from worker.output.parsers.schema import ANY, STRING, Types, coerced, json_text
from worker.output.parsers.xml_notation import ParameterStart, XmlNotation, all_spellings, attribute, ends_again
from worker.output.parsers.xml_values import CallState, ValueReader

_WRAPPERS: Final = frozenset({"properties", "arguments", "parameters"})
# A value of unknown type is a string unless it begins with one of these characters, or with whitespace.
_MAYBE_JSON: Final = frozenset('{["-0123456789tfnTFN+.(')
_TYPES: Final[dict[str, Types]] = {
    "string": STRING,
    "number": frozenset({"number"}),
    "boolean": frozenset({"boolean"}),
    "null": frozenset({"null"}),
    "object": frozenset({"object"}),
    "array": frozenset({"array"}),
}


@dataclass(frozen=True, slots=True)
class XmlCalls(XmlNotation):
    """Parser of calls in an `XmlNotation`."""

    def calls(self, ctx: ParserContext, hit: str) -> Steps[None]:
        r = ctx.r
        char = yield from r.space()
        if self.json and char in ("{", "["):
            yield from JsonCalls(self.wrap, self.wrap_end or (self.call_end,)).calls(ctx, hit)
            return
        is_wrapped, has_call = hit in self.wrap, False
        if not self.call:
            yield from self._one(ctx, is_wrapped)
            return
        while (not has_call and not is_wrapped) or (yield from self._next(ctx, is_wrapped, has_call)):
            yield from self._one(ctx, is_wrapped)
            has_call = True
        if not has_call:
            raise Malformed
        if (yield from self.call_end_or_cut(r)) in ("", *all_spellings(self.call_end)):
            ctx.awaited = self.wrap_end if is_wrapped else ()
        yield from ends_again(r, (self.param_end, *self.inner_ends))

    def _next(self, ctx: ParserContext, is_wrapped: bool, has_call: bool) -> Steps[bool]:
        """Read the start of the next call, and the text before it or before the end of the wrapper, which is content.

        Return whether there is a call.
        """
        r, start = ctx.r, markers(*self.inner_starts)
        yield from r.space()
        if (yield from r.literal(start)):
            return True
        if not is_wrapped:
            return False
        text = yield from r.ahead(self._prose(ctx, has_call), LOOKAHEAD_LIMIT)
        if text:
            ctx.out.text(r.take(len(text)))
            r.trace = []
        return bool((yield from r.literal(start)))

    def _prose(self, ctx: ParserContext, has_call: bool) -> Steps[str]:
        """Return the text before the next call in a wrapper or, after a call, before the end of the wrapper."""
        r = ctx.r
        text, hit = yield from r.capture(markers(*self.wrap, *self.inner_starts, *self.ends), keep=True)
        if hit in self.inner_starts:
            yield from r.literal(markers(hit))
            head = yield from self.head(ctx)
            if not head.is_closed and (yield from r.space()) != "{" and not (yield from self.is_body(r)):
                raise Malformed
        elif not has_call or hit not in self.wrap_end:
            raise Malformed
        return text

    def _one(self, ctx: ParserContext, is_wrapped: bool) -> Steps[None]:
        r = ctx.r
        name, key, is_ended = yield from self.head(ctx)
        known = ctx.tools.declared(name)
        call = CallState(ctx, ctx.tools.parameters(known), is_wrapped)
        # A call is announced only when a parameter, its arguments as JSON or its end marker follows its name.
        opening: ParameterStart | None = None
        if key:
            opening = yield from self.after_key(r, key, "")
        elif not is_ended:
            char = yield from r.space()
            if (char == "{" and (is_wrapped or known in ctx.tools)) or (yield from self._json_block(ctx)):
                yield from self._json(ctx, name)
                return
            opening = yield from self.opening(r, call.params)
        is_ended = is_ended or (not opening and bool((yield from self.call_end_or_cut(r))))
        if not opening and not is_ended:
            raise Malformed
        begin(ctx, name)
        arguments = _Arguments(self, call)
        while opening:
            yield from arguments.add(opening)
            yield from r.space()
            opening = yield from self.opening(r, call.params)
        if not is_ended and not (yield from self.call_end_or_cut(r)):
            raise Unclosed if r.ended and r.at == len(r.buf) else Malformed
        if not call.quoted.issubset(call.given):
            raise Malformed  # a value may hold a further argument
        arguments.close()
        end(ctx)
        yield from ends_again(r, (self.param_end, *all_spellings(self.call_end)))

    def _json_block(self, ctx: ParserContext) -> Steps[bool]:
        if not self.json_block or not (yield from ctx.r.literal(markers(self.json_block))):
            return False
        yield from ctx.r.capture(markers(self.key_end))
        return True

    def _json(self, ctx: ParserContext, name: str) -> Steps[None]:
        """Read arguments that are one object, and the end of the call."""
        r = ctx.r
        yield from json_arguments(ctx, begin(ctx, name))
        yield from r.space()
        yield from r.literal(markers(self.json_end))
        if not (yield from r.space()):
            raise Unclosed
        if not (yield from self.call_end_or_cut(r)):
            ctx.out.is_broken = True  # the object is complete, the call is not
            raise Malformed
        end(ctx)


@dataclass(slots=True)
class _Arguments:
    """JSON object of the parameters of one call."""

    form: XmlCalls
    call: CallState
    is_raw: bool = False
    # Texts of the values by key.
    texts: dict[str, str] = field(default_factory=dict[str, str])

    def add(self, opening: ParameterStart) -> Steps[None]:
        """Read one parameter; a string is emitted as it arrives. A key may be written twice only with equal values."""
        key = opening.key
        types = self._types(opening)
        if key not in self.call.given:
            yield from self._first(opening, types)
            return
        text = "" if opening.is_empty else (yield from self._value(opening, types))
        if text != self.texts[key]:
            raise Malformed

    def _types(self, opening: ParameterStart) -> Types:
        types = self.call.params.types(opening.key)
        kind = attribute(opening.label, "string", "type")
        if kind and not types:
            types = {"true": STRING, "false": ANY}.get(kind) or _TYPES.get(kind, ANY)
        elif kind in ("true", "string") and "string" in types:
            types = STRING
        return types

    def _value(self, opening: ParameterStart, types: Types) -> Steps[str]:
        value = ValueReader(self.form, self.call, opening, types)
        yield from value.start()
        return (yield from collected(value.text))

    def _first(self, opening: ParameterStart, types: Types) -> Steps[None]:
        out, given, key, parts = self.call.ctx.out, self.call.given, opening.key, list[str]()
        lead = ("{" if not given else ", ") + quoted(key) + ": "
        if opening.is_empty:
            given.append(key)
            self.texts[key] = ""
            self._emit(key, "", types, lead)
            return

        def stream(text: str) -> None:
            parts.append(text)
            out.args(escaped(text))

        value = ValueReader(self.form, self.call, opening, types)
        yield from value.start()
        first = yield from self.call.ctx.r.peek()
        given.append(key)
        if types == STRING or (not types and first not in _MAYBE_JSON and not first.isspace()):
            out.args(lead + '"')
            yield from value.text(stream)
            out.args('"')
        else:
            yield from value.text(parts.append)
            kind = attribute(opening.label, "string", "type")
            is_text = "string" in types or (not types and kind in ("", "true", "string"))
            if value.has_markup and not is_text and json_text("".join(parts).strip()) is None:
                raise Malformed  # the markup may be that of a further argument
            self._emit(key, "".join(parts), types, lead)
        self.texts[key] = "".join(parts)

    def _emit(self, key: str, text: str, types: Types, lead: str) -> None:
        out, given = self.call.ctx.out, self.call.given
        if key in _WRAPPERS and key not in self.call.params.names and len(given) == 1:
            # Some models wrap all arguments in another object.
            inner = json_text(text.strip())
            if inner is not None and inner.startswith("{"):
                out.args(inner)
                self.is_raw = True
                return
        out.args(lead + coerced(text, types))

    def close(self) -> None:
        if not self.is_raw:
            self.call.ctx.out.args("}" if self.call.given else "{}")
