"""Calls as tags around plain text: Qwen3-Coder, GLM, MiniMax, DeepSeek V3.2, Seed, MiniCPM, Kimi K3, Muse and more."""

import re
from dataclasses import dataclass
from typing import Final

from worker.output.parsers.call import NAME_LIMIT, ParserContext, begin, checked, drop, end, json_arguments
from worker.output.parsers.json_calls import JsonCalls
from worker.output.parsers.literal import escaped, quoted
from worker.output.parsers.reader import Malformed, Steps, Unclosed, markers
from worker.output.parsers.schema import ANY, STRING, Parameters, Types, coerced, json_text

_ATTRIBUTE = re.compile(r"([\w:]+)\s*=\s*(?:\"([^\"]*)\"|'([^']*)'|([^\s\"'>]+))")
_WRAPPERS: Final = frozenset({"properties", "arguments", "parameters"})
_CDATA: Final = "<![CDATA["
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
class XmlCalls:
    """Notation `wrap` `call` name `head_end` (`param` key `key_end` value `param_end`)* `call_end` `wrap_end`.

    A name or key is the text of its tag, or the tag's attribute `name`, `tool` or `key`. An empty `wrap` means that
    calls have no wrapper; `call_alone` makes the wrapper optional. With `strip_line`, the first and last line break of
    a value belong to the markup; with `inline`, the last line break does so only if the first is present. `json_block`
    holds all arguments as one object; `json` means that the call may be JSON.
    """

    wrap: tuple[str, ...]
    wrap_end: tuple[str, ...]
    call: str
    head_end: tuple[str, ...]
    param: str
    key_end: str
    param_end: str
    call_end: str
    value: str = ""
    call_alone: bool = True
    strip_line: bool = True
    inline: bool = False
    json: bool = False
    cdata: bool = False
    json_block: str = ""

    @property
    def starts(self) -> tuple[str, ...]:
        return self.wrap + ((self.call,) if self.call and (self.call_alone or not self.wrap) else ())

    @property
    def ends(self) -> tuple[str, ...]:
        return (self.call_end, *self.wrap_end)

    def calls(self, ctx: ParserContext, hit: str) -> Steps[None]:
        r = ctx.r
        char = yield from r.space()
        if self.json and char in ("{", "["):
            yield from JsonCalls(self.wrap, self.wrap_end or (self.call_end,)).calls(ctx, hit)
            return
        is_open = hit == self.call
        calls, opening = 0, markers(self.call)
        while True:
            if not is_open and self.call:
                yield from r.space()
                if not (yield from r.literal(opening)):
                    if calls:
                        break
                    raise Malformed
            yield from self._one(ctx, is_alone=is_open)
            calls += 1
            is_open = False
            if not self.call:
                return
        yield from r.literal(markers(*self.wrap_end))

    def _one(self, ctx: ParserContext, is_alone: bool) -> Steps[None]:
        r = ctx.r
        head, closing = yield from r.capture(markers(*self.head_end), NAME_LIMIT, keep=True)
        if self.call or closing == "\n":
            yield from r.literal(markers(closing))
        name = checked(_attribute(head, "name", "tool") or head.strip().removeprefix("="))
        known = markers(self.param, self.call_end, *self.wrap_end, *((self.json_block,) if self.json_block else ()))
        # A call is announced only when a parameter or its end marker follows its name. Inside a wrapper, text between
        # them is skipped.
        if is_alone or not self.call:
            hit = yield from r.expect(known)
        else:
            _, hit = yield from r.capture(known, NAME_LIMIT)
        params = begin(ctx, name)
        arguments = _Arguments(ctx)
        while hit == self.param or hit == self.json_block:
            if hit == self.param:
                yield from self._param(ctx, params, arguments)
            else:
                yield from r.capture(markers(self.key_end), NAME_LIMIT)
                yield from json_arguments(ctx, params)
                arguments.is_raw = True
            # Text between parameters is ignored, unless the output ends with it.
            stray = list[str]()
            hit = yield from r.until(known, stray.append)
            if not hit:
                raise Malformed if "".join(stray).strip() else Unclosed
        arguments.close()
        end(ctx)

    def _param(self, ctx: ParserContext, params: Parameters, arguments: "_Arguments") -> Steps[None]:
        r = ctx.r
        head, _ = yield from r.capture(markers(self.key_end), NAME_LIMIT)
        key = _attribute(head, "name", "key") or head.strip().removeprefix("=").strip().strip("\"'")
        if self.value:
            yield from r.expect(markers(self.value))
        types = params.types(key)
        if (kind := _attribute(head, "string", "type")) and not types:
            types = {"true": STRING, "false": ANY}.get(kind) or _TYPES.get(kind, ANY)
        ends = [self.param_end]
        if self.strip_line:
            # A value may also end before these texts, which show that its end tag is missing.
            ends += ["\n" + self.param, *("\n" + end for end in self.ends)]
            if (yield from r.literal(markers("\n"))) or not self.inline:
                ends.append("\n" + self.param_end)
        if self.cdata and (yield from r.literal(markers(_CDATA))):
            yield from arguments.add(key, types, params, ("]]>",))
            yield from r.until(markers(self.param_end), drop)
            return
        hit = yield from arguments.add(key, types, params, tuple(ends))
        yield from r.literal(markers(hit if hit.strip() == self.param_end else "\n"))


@dataclass(slots=True)
class _Arguments:
    """JSON object of the parameters of one call."""

    ctx: ParserContext
    keys: int = 0
    is_raw: bool = False

    def add(self, key: str, types: Types, params: Parameters, ends: tuple[str, ...]) -> Steps[str]:
        """Read one value up to one of `ends`, which is not consumed; a string is emitted as it arrives."""
        r, out = self.ctx.r, self.ctx.out
        stop = markers(*ends)
        lead = ("{" if not self.keys else ", ") + quoted(key) + ": "
        first = yield from r.peek()
        if types == STRING or (not types and first not in _MAYBE_JSON and not first.isspace()):
            self.keys += 1
            out.args(lead + '"')
            hit = yield from r.until(stop, lambda text: out.args(escaped(text)), keep=True)
            out.args('"' if hit else "")
        else:
            parts: list[str] = []
            if hit := (yield from r.until(stop, parts.append, keep=True)):
                self._emit(key, "".join(parts), types, params, lead)
        if not hit:
            raise Malformed
        return hit

    def _emit(self, key: str, text: str, types: Types, params: Parameters, lead: str) -> None:
        out = self.ctx.out
        if key in _WRAPPERS and key not in params.names and not self.keys:
            # Some models wrap all arguments in another object.
            inner = json_text(text.strip())
            if inner is not None and inner.startswith("{"):
                out.args(inner)
                self.is_raw = True
                return
        self.keys += 1
        out.args(lead + coerced(text, types))

    def close(self) -> None:
        if not self.is_raw:
            self.ctx.out.args("}" if self.keys else "{}")


def _attribute(head: str, *names: str) -> str:
    """Return the first of these attributes in a tag, with XML's two common entities resolved."""
    if "=" not in head:
        return ""
    for match in _ATTRIBUTE.finditer(head):
        if match[1] in names:
            text = match[2] or match[3] or match[4] or ""
            return text.replace("&quot;", '"').replace("&amp;", "&")
    return ""
