"""MiniMax M3's calls: each parameter is a tag with its own name, and may contain nested tags."""

from dataclasses import dataclass, field
from typing import Final

from worker.output.parsers.call import NAME_LIMIT, ParserContext, begin, checked, end, json_arguments
from worker.output.parsers.literal import quoted
from worker.output.parsers.reader import Emit, Malformed, MarkupReader, Steps, Unclosed, collected, markers
from worker.output.parsers.schema import Types, ValueSchema, coerced
from worker.output.parsers.xml_values import LOOKAHEAD_LIMIT

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
