"""Common steps of all tool-call formats: announcing a call, its arguments, and abandoning it."""

import json
import re
import sys
from dataclasses import dataclass
from typing import Final, Protocol

from worker.output.parsers.events import ParsedOutput
from worker.output.parsers.literal import (
    LOOSE,
    LiteralSyntax,
    gap,
    is_padded,
    is_string_start,
    may_begin_key,
    padded,
    quoted,
    scalar,
    separators,
    token,
    value,
)
from worker.output.parsers.quotes import CallSyntax
from worker.output.parsers.reader import (
    Emit,
    Malformed,
    MarkerSet,
    MarkupReader,
    Steps,
    Unclosed,
    collected,
    markers,
    stray,
)
from worker.output.parsers.schema import STRING, Parameters, Tools, coerced_string, json_text

NAME_LIMIT: Final = 256
# Maximum number of characters of a lookahead, more than the markup between any two values.
LOOKAHEAD_LIMIT: Final = 512
FENCE: Final = "```"
_FENCES: Final = markers(FENCE)
_LANGUAGES: Final = markers("json", "JSON", "python", "tool_call", "tool_calls", "tool_code")
_NOT_IN_KEYS: Final = tuple("\"'{}[](),<")
# Match brackets that are too many after arguments, or after a whole call in JSON, and as group 1 what begins a further
# argument there.
_ARGUMENT_LEFT: Final = re.compile(r"[\s\]})]*([,;:{\"'])?")
FIELD_LEFT: Final = re.compile(r"[\s\]})]*(?:,\s*([\"'])?)?")
_AFTER_LIMIT: Final = 64
_NAME = re.compile(r"[\w.\-:/@$]+")


@dataclass(slots=True)
class ParserContext:
    """State of one parser, which its formats work on."""

    r: MarkupReader
    out: ParsedOutput
    tools: Tools
    in_code: bool = False  # whether a fence has opened a block of code in the text
    # End markers that the calls read last lack so far: text may stand before them.
    awaited: tuple[str, ...] = ()
    # Position in the whole text up to which the first call must have begun, in a lookahead.
    begin_by: int = sys.maxsize


class CallFormat(Protocol):
    """Notation of tool calls. Objects are frozen, and shared by all parsers."""

    @property
    def starts(self) -> tuple[str, ...]:
        """Markers that may begin a call."""
        ...

    @property
    def ends(self) -> tuple[str, ...]:
        """Return the markers that end a broken call. If there are none, text follows the broken call directly."""
        ...

    def calls(self, ctx: ParserContext, hit: str) -> Steps[None]:
        """Read the calls that begin with `hit`, which is consumed. Raises `Malformed`."""
        ...


def drop(_: str) -> None:
    """Ignore text inside a call's markup that has no meaning."""


def attempt(ctx: ParserContext, form: CallFormat, hit: str, text: Emit, written: str = "") -> Steps[bool]:
    """Parse calls that begin with `hit`, which may be `written` differently; pass markup that turns out not to be a
    call to `text`. Returns whether there was a call.
    """
    r, out, before = ctx.r, ctx.out, ctx.out.calls
    r.trace, ctx.awaited = [written or hit], ()
    try:
        yield from read_calls(ctx, form, hit)
    except Malformed as error:
        if out.in_call:
            yield from _break_off(ctx, form, isinstance(error, Unclosed))
        else:
            raw = r.untrace()
            # A marker or bracket alone is ordinary text. With more text after it, it was probably an attempt at a call.
            # So is text after a call that is no call.
            is_attempt = out.calls > before or len(raw.rstrip()) > len(hit) + 1
            out.malformed += is_attempt if is_marker(hit) else '"name"' in raw
            # A marker behind a call, with which the output ends, begins nothing.
            is_left = out.calls > 0 and out.is_blank and raw.strip() == hit and not (yield from r.peek())
            text("" if is_left and is_marker(hit) else raw)
    if out.calls == before:
        ctx.awaited = ()
    tail, r.trace = "".join(r.trace or ()), None
    if out.calls > before and (blank := tail[len(tail.rstrip()) :]):
        # Whitespace after the last call belongs to the text, if no further call follows.
        out.text(blank)
    return out.calls > before


def read_calls(ctx: ParserContext, form: CallFormat, hit: str) -> Steps[None]:
    """Read the calls that begin with `hit`, which is consumed and may be written again. Raises `Malformed`."""
    if is_marker(hit):
        yield from ctx.r.again(markers(hit))
    yield from form.calls(ctx, hit)


def is_marker(hit: str) -> bool:
    """Return whether the start of calls is markup, not a bracket or fence."""
    return len(hit) > 1 and hit != FENCE


def _break_off(ctx: ParserContext, form: CallFormat, is_unclosed: bool) -> Steps[None]:
    """Abandon a call that was announced, and drop its remaining markup: arguments are never reassembled.

    If the model ended the call with only its last brackets missing, these are added.
    """
    r, left = ctx.r, list[str]()
    ctx.out.malformed += 1
    if form.ends:
        hit = yield from r.until(markers(*form.ends, *form.starts), left.append, keep=True)
        while (yield from r.literal(markers(*form.ends))):
            yield from r.space()
        is_over = bool(hit) or not r.is_cut
    else:
        is_over = r.ended and not r.is_cut and r.at == len(r.buf)
    ctx.out.break_off(is_closable=is_unclosed and is_over and not "".join(left).strip())


def checked(name: str) -> str:
    """Return `name` if it is well-formed, because a malformed name means that the text is prose. Raises `Malformed`."""
    name = name.strip().strip("\"'")
    if not _NAME.fullmatch(name):
        raise Malformed
    return name


def read_name(r: MarkupReader) -> Steps[str]:
    """Read the longest name at the current position. Raises `Malformed` if there is none."""
    parts: list[str] = []
    size = 0
    while size <= NAME_LIMIT:
        match = _NAME.match(r.buf, r.at)
        if match:
            size += len(match[0])
            parts.append(r.take(len(match[0])))
        if r.at < len(r.buf) or r.ended:
            break
        yield
    if not parts:
        raise Malformed
    return "".join(parts)


def begin(ctx: ParserContext, name: str, call_id: str = "") -> Parameters:
    """Announce a call; after that, its markup cannot be emitted as text any more."""
    name = ctx.tools.declared(name.strip())
    if not name or len(name) > NAME_LIMIT or (not ctx.out.calls and ctx.r.position > ctx.begin_by):
        raise Malformed
    ctx.out.begin(name, call_id)
    ctx.r.trace = None
    return ctx.tools.parameters(name)


def end(ctx: ParserContext) -> None:
    """Complete the call; another call or text may follow."""
    ctx.out.end()
    ctx.r.trace = []


def members(
    ctx: ParserContext,
    params: Parameters,
    emit: Emit,
    dialect: LiteralSyntax = LOOSE,
    close: str = "}",
    separator: MarkerSet = markers(":"),  # noqa: B008 - immutable
) -> Steps[None]:
    """Read `key: value` pairs up to `close`, and emit them as a JSON object. The opening bracket is already read.

    A key is never emitted twice: the second one is `Malformed`.
    """
    r = ctx.r
    emit("{")
    keys: set[str] = set()
    if dialect.bare and params.is_closed:
        dialect = dialect._replace(names=frozenset(params.names))
    while True:
        char = yield from gap(r, dialect)
        has_separator = not keys or (char != "" and char in separators(dialect))
        if keys and has_separator:
            r.take(1)
            char = yield from gap(r, dialect)
        elif keys and char != close:
            needs_comma = close != "}" and not dialect.bare
            if needs_comma or not (yield from may_begin_key(r, char, dialect)):
                raise stray(char)
        if char == close:
            r.take(1)
            emit("}")
            return
        key = yield from _member_key(r, params, char, dialect, separator)
        is_stray = bool(dialect.names) and not has_separator and key not in dialect.names
        if key in keys or is_stray:
            raise Malformed
        emit((", " if keys else "") + quoted(key) + ": ")
        keys.add(key)
        if dialect.bare or dialect.python:
            dialect = _after_key(dialect, params, key, keys)
        yield from _member_value(r, params, key, emit, dialect)


def _after_key(dialect: LiteralSyntax, params: Parameters, key: str, keys: set[str]) -> LiteralSyntax:
    """Return the notation of the value of `key`, the last of the `keys` so far."""
    left = frozenset(params.names.keys() - keys)
    if python := dialect.python:
        syntax = CallSyntax(python.tools, python.ends, left if params.is_closed else None)
        return dialect._replace(python=syntax)
    return dialect._replace(keys=left, is_text="string" in params.types(key))


def _member_key(
    r: MarkupReader, params: Parameters, char: str, dialect: LiteralSyntax, separator: MarkerSet
) -> Steps[str]:
    if is_string_start(char, dialect):
        key = yield from collected(lambda emit: scalar(r, char, emit, dialect))
        yield from r.expect(separator)
        return json.loads(key)
    if not dialect.bare and ":" in separator.words:
        raise Malformed
    # The key must not extend beyond the end of a broken call.
    key, hit = yield from r.capture(markers(*separator.words, *_NOT_IN_KEYS), NAME_LIMIT, keep=True)
    key = key.strip()
    if hit not in separator.words or not (key in params.names or len(key.split()) == 1):
        raise Malformed
    yield from r.literal(separator)
    return key


def _member_value(r: MarkupReader, params: Parameters, key: str, emit: Emit, dialect: LiteralSyntax) -> Steps[None]:
    types = params.types(key)
    char = yield from gap(r, dialect)
    is_string = is_string_start(char, dialect)
    is_fitting = is_string == ("string" in types) and (is_string or not dialect.bare)
    if not types or char in ("{", "[", "(") or is_fitting:
        yield from value(r, emit, dialect)
        return
    if not is_string and not dialect.bare:
        word = yield from token(r)
        text = quoted(word) if "string" in types and is_padded(word) else padded(word)
    else:
        levels = ")" if dialect.python else ""
        text = yield from collected(lambda emit: scalar(r, char, emit, dialect, levels))
    if text.startswith('"'):
        emit(coerced_string(text, types))
    else:
        emit(quoted(text) if types == STRING and not text.startswith("n") else text)


def expect_keywords(r: MarkupReader, whole: re.Pattern[str], begun: re.Pattern[str]) -> Steps[None]:
    """Look ahead and raise `Malformed` unless keyword arguments follow, as `whole` matches them; `begun` matches what
    may still become such.
    """
    for size in range(2, NAME_LIMIT):
        text = yield from r.peek(size)
        if whole.match(text):
            return
        if len(text) < size or not begun.fullmatch(text):
            break
    raise Malformed


def expect_end(r: MarkupReader) -> Steps[None]:
    """Read brackets that are too many after arguments, and raise `Malformed` unless markup follows: other text may be a
    further argument, which would be lost.
    """
    char = yield from r.space()
    while char and char in "]})":
        r.take(1)
        char = yield from r.space()
    if char and char not in "<`":
        raise Malformed


def refuse_continuation(r: MarkupReader, pattern: re.Pattern[str] = _ARGUMENT_LEFT) -> Steps[None]:
    """Raise `Malformed` if a further argument follows, where text may follow a call. Consumes nothing."""
    while True:
        match = pattern.match(r.buf, r.at, r.at + _AFTER_LIMIT)
        end = match.end() if match else r.at
        if end < len(r.buf) or r.ended or end - r.at == _AFTER_LIMIT:
            break
        yield
    if match and match[1]:
        raise Malformed


def fence(ctx: ParserContext, hit: str) -> Steps[bool]:
    """Read the fence that opens a block of calls, if it comes next or is `hit`; return whether there was one.

    Raises `Malformed` if `hit` ends a block of code. Until a call is read, the block may be code.
    """
    if hit == FENCE:
        ctx.in_code = not ctx.in_code
        if not ctx.in_code:
            raise Malformed
    elif not (yield from ctx.r.literal(_FENCES)):
        return False
    yield from ctx.r.literal(_LANGUAGES)
    return True


def end_fence(ctx: ParserContext) -> Steps[None]:
    """Read the fence that ends a block of calls, which was no code."""
    ctx.in_code = False
    yield from ctx.r.space()
    yield from ctx.r.literal(_FENCES)


def json_arguments(ctx: ParserContext, params: Parameters, emit: Emit | None = None) -> Steps[None]:
    """Read the JSON object of a call's arguments, which some models encode again, as a JSON string."""
    emit = emit or ctx.out.args
    if (yield from ctx.r.space()) == "{":
        ctx.r.take(1)
        yield from members(ctx, params, emit)
        return
    text = yield from collected(lambda emit: value(ctx.r, emit))
    if text in ("null", '""', "[]"):
        emit("{}")
        return
    inner = json_text(json.loads(text).strip()) if text.startswith('"') else None
    if inner is None or not inner.startswith("{"):
        raise Malformed
    emit(inner)
