"""Calls as tags around plain text: Qwen3-Coder, GLM, MiniMax, DeepSeek V3.2, Seed, MiniCPM, Kimi K3, Muse and more.

MiniMax M3's calls: each parameter is a tag with its own name, and may contain nested tags.
"""

from dataclasses import dataclass, field
from typing import Final

from worker.output.parsers.call import LOOKAHEAD_LIMIT, NAME_LIMIT, ParserContext, begin, checked, end, json_arguments
from worker.output.parsers.json_calls import JsonCalls
from worker.output.parsers.literal import escaped, quoted
from worker.output.parsers.reader import Emit, Malformed, MarkupReader, Steps, Unclosed, collected, markers
from worker.output.parsers.schema import ANY, STRING, Types, ValueSchema, coerced, json_text
from worker.output.parsers.xml_notation import (
    CallState,
    ParameterStart,
    ValueReader,
    XmlNotation,
    all_spellings,
    attribute,
    ends_again,
)

_NS: Final = "]<]minimax[>["
_MAX_DEPTH: Final = 32


@dataclass(slots=True)
class _Node:
    """Tag that contains text or further tags. `source` is its raw text between the opening and the closing tag;
    `has_text` means that there is text beside further tags.
    """

    tag: str
    source: str = ""
    has_text: bool = False
    children: "list[_Node]" = field(default_factory=list["_Node"])


@dataclass(frozen=True, slots=True)
class MiniMaxM3Calls:
    starts: tuple[str, ...] = (f"{_NS}<tool_call>",)
    ends: tuple[str, ...] = (f"{_NS}</tool_call>",)

    def calls(self, ctx: ParserContext, hit: str) -> Steps[None]:
        r = ctx.r
        yield from r.expect(markers(f"{_NS}<invoke"))
        while True:
            head, _ = yield from r.capture(markers(">"), NAME_LIMIT)
            name = checked(head.partition("=")[2])
            yield from self._arguments(ctx, name)
            end(ctx)
            yield from r.space()
            if not (yield from r.literal(markers(f"{_NS}<invoke"))):
                break
        yield from r.literal(markers(*self.ends))

    def _arguments(self, ctx: ParserContext, name: str) -> Steps[None]:
        """Read the arguments of a call and its end."""
        r, out, given = ctx.r, ctx.out, dict[str, str]()
        if (yield from r.space()) == "{":
            yield from json_arguments(ctx, begin(ctx, name))
            yield from r.expect(markers(f"{_NS}</invoke>"))
            return
        tag = yield from _tag(r)
        params = begin(ctx, name)
        while tag != "/invoke":
            if tag.startswith("/"):
                raise Malformed
            schema = params.value(tag)
            if _is_text(schema.types):
                value = coerced((yield from collected(lambda emit, tag=tag: _text(r, tag, emit))), schema.types)
            else:
                value = _json((yield from _read(r, tag)), schema)
            if tag not in given:
                out.args(("{" if not given else ", ") + quoted(tag) + ": " + value)
            elif given[tag] != value:
                raise Malformed
            given[tag] = value
            if not (yield from r.space()):
                raise Unclosed
            tag = yield from _tag(r)
        out.args("}" if given else "{}")


def _text(r: MarkupReader, tag: str, emit: Emit) -> Steps[None]:
    """Read a text up to its end tag: the one after which the call can go on, and that closes no tag in the text."""
    start, stop, depth = f"{_NS}<{tag}>", f"{_NS}</{tag.partition(' ')[0]}>", 0
    while hit := (yield from r.until(markers(start, stop), emit, keep=True)):
        if hit == stop:
            follows = yield from r.ahead(_after_text(r, stop), LOOKAHEAD_LIMIT)
            if follows is not None and (not depth or follows):
                r.take(len(stop))
                return
        depth = max(0, depth + (1 if hit == start else -1))
        emit(r.take(len(hit)))
    raise Malformed


def _after_text(r: MarkupReader, stop: str) -> Steps[bool]:
    """Return whether the output ends after an end tag and the end of the call; raises `Malformed` if neither this nor
    another parameter follows.
    """
    yield from r.literal(markers(stop))
    for marker in (f"{_NS}</invoke>", f"{_NS}</tool_call>"):
        if not (yield from r.space()):
            return True
        if not (yield from r.literal(markers(marker))):
            break
    else:
        return not (yield from r.space())
    if marker == f"{_NS}</invoke>":
        tag = yield from _tag(r)
        if tag.startswith("/"):
            raise Malformed
    return False


def _tag(r: MarkupReader) -> Steps[str]:
    yield from r.expect(markers(f"{_NS}<"))
    tag, _ = yield from r.capture(markers(">"), NAME_LIMIT)
    return tag


def _read(r: MarkupReader, tag: str) -> Steps[_Node]:
    """Read the contents and the end of the tag `tag`, which was just opened."""
    pieces: list[str] = []
    top = _Node(tag)
    # Each open tag is stored with the number of text pieces that precede its contents.
    open_ = [(top, 0)]
    while open_:
        text = list[str]()
        if not (yield from r.until(markers(f"{_NS}<"), text.append)):
            raise Malformed
        pieces += text
        open_[-1][0].has_text |= bool("".join(text).strip())
        name, _ = yield from r.capture(markers(">"), NAME_LIMIT)
        if name.startswith("/"):
            node, start = open_.pop()
            if name[1:] not in (node.tag, node.tag.partition(" ")[0]):
                raise Malformed
            node.source = "".join(pieces[start:])
        pieces.append(f"{_NS}<{name}>")
        if name.startswith("/"):
            continue
        if len(open_) >= _MAX_DEPTH:
            raise Malformed
        node = _Node(name)
        open_[-1][0].children.append(node)
        open_.append((node, len(pieces)))
    return top


def _json(node: _Node, schema: ValueSchema) -> str:
    """Return the node as JSON; recursion is bounded by `_MAX_DEPTH`."""
    types = schema.types
    if not node.children or _is_text(types):
        # A value that can only be text keeps the tags inside it as text.
        text = node.source
        if not text.strip() and types and "string" not in types:
            return "[]" if "array" in types else "{}" if "object" in types else coerced(text, types)
        return coerced(text, types)
    if node.has_text:
        raise Malformed  # the text would be lost
    tags = {child.tag for child in node.children}
    is_list, is_object = "array" in types, "object" in types
    if (tags == {"item"} and (is_list or not is_object)) or (len(tags) == 1 and is_list and not is_object):
        return _array([_json(child, schema.items) for child in node.children])
    return _object(node, schema)


def _is_text(types: Types) -> bool:
    return "string" in types and types.isdisjoint(("array", "object"))


def _array(items: list[str]) -> str:
    return "[" + ", ".join(items) + "]"


def _object(node: _Node, schema: ValueSchema) -> str:
    members = schema.members({child.tag: child.source for child in node.children})
    values: dict[str, list[str]] = {}
    for child in node.children:
        values.setdefault(child.tag, []).append(_json(child, members[child.tag]))
    # A repeated tag becomes a list.
    pairs = (f"{quoted(tag)}: {each[0] if len(each) == 1 else _array(each)}" for tag, each in values.items())
    return "{" + ", ".join(pairs) + "}"


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
