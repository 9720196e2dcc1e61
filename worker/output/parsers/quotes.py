"""Detection of the quote that ends a string, in Python calls with unescaped inner quotes, as in `run(command="grep "x"
y")`.

A quote ends its string if the call can continue after the quote. That is true of every closing quote in valid Python
(except between adjacent strings, which only shells have), so only invalid Python is parsed differently. The lookahead
stops at the next quote at the latest.
"""

import re
from typing import Final

from worker.output.parsers.reader import Malformed, MarkupReader, Steps

# Maximum lookahead in characters, which is more than the padding of any model's calls.
_LOOKAHEAD_LIMIT: Final = 256
_SPACE: Final = re.compile(r"\s*")
_WORD: Final = re.compile(r"[\w.\-]*")
_VALUE_START: Final = frozenset("\"'[({+-.0123456789")
_OPERATORS: Final = frozenset("|&;<>=)]},.:'\"+%/\\")
_CONSTANTS: Final = frozenset({"True", "False", "None", "true", "false", "null", "nan", "NaN", "inf", "Infinity"})


def ends_string(r: MarkupReader, levels: str, is_key: bool) -> Steps[bool]:
    """Return whether the next quote ends its string. Consumes nothing.

    `levels` are the brackets that close the open levels; the first is the call's. With `is_key`, a colon may follow.
    Raises `Malformed` if the string is part of an expression.
    """
    at, char = yield from _skip(r, 1)
    if char and char in "+%.":
        yield from _refuse_expression(r, at, char)
    depth = len(levels)
    while char:
        if not depth:
            return (yield from _follows_call(r, at, char))
        if char == levels[depth - 1]:
            at, char = yield from _skip(r, at + 1)
            depth, is_key = depth - 1, False
            continue
        if char == "<":
            return (yield from _is_marker(r, at))
        if char != ",":
            return char == ":" and is_key
        at, char = yield from _skip(r, at + 1)
        if char != levels[depth - 1]:
            return (yield from _is_keyword(r, at) if depth == 1 else _is_value(r, at, char))
    return True


def has_lost_argument(r: MarkupReader) -> Steps[bool]:
    """Return whether a comma after a call is followed by something other than a call: an argument after its bracket.
    Consumes nothing."""
    at, char = yield from _skip(r, 0)
    if char not in (",", ";"):
        return False
    at, char = yield from _skip(r, at + 1)
    if char in ("", "]", "<"):
        return False
    at, name = yield from _word(r, at)
    return not name or (yield from _char(r, at)) not in ("", "(")


def _refuse_expression(r: MarkupReader, at: int, char: str) -> Steps[None]:
    """Raise `Malformed` for `"a" + b`, `"%s" % x` and `"a".join(b)`, whose values cannot be known."""
    if char != ".":
        if (yield from _char(r, at + 1)).isspace():
            raise Malformed
    elif at == 1:
        after, word = yield from _word(r, at + 1)
        if word.isidentifier() and (yield from _char(r, after)) == "(":
            raise Malformed


def _follows_call(r: MarkupReader, at: int, char: str) -> Steps[bool]:
    """Return whether the text at `at` may follow the bracket that closes a call."""
    if char == "<":
        return (yield from _is_marker(r, at))
    if char in ",;":
        at, char = yield from _skip(r, at + 1)
        if not char:
            return True
    if char != "]":
        return (yield from _is_call(r, at))
    after, char = yield from _skip(r, at + 1)
    if char == "<" and (yield from _is_marker(r, after)):
        return True
    # Text may follow the list on its own line, or on the same line. On the same line it must not begin with an
    # operator, which would continue a command inside the string.
    return not char or char not in _OPERATORS or "\n" in r.buf[r.at + at + 1 : r.at + after]


def _is_call(r: MarkupReader, at: int) -> Steps[bool]:
    at, name = yield from _word(r, at)
    if not name or (yield from _char(r, at)) != "(":
        return False
    at, char = yield from _skip(r, at + 1)
    return char in ("", ")") or (yield from _is_keyword(r, at))


def _is_keyword(r: MarkupReader, at: int) -> Steps[bool]:
    at, name = yield from _word(r, at)
    at, char = yield from _skip(r, at)
    return not char or (bool(name) and char == "=" and (yield from _char(r, at + 1)) != "=")


def _is_value(r: MarkupReader, at: int, char: str) -> Steps[bool]:
    if not char or char in _VALUE_START:
        return True
    _, word = yield from _word(r, at)
    return word in _CONSTANTS


def _is_marker(r: MarkupReader, at: int) -> Steps[bool]:
    """Return whether markup (`<|…` or `</name>`) follows here, which means that closing brackets are missing."""
    char = yield from _char(r, at + 1)
    if char != "/":
        return char in ("", "|", "｜")
    at, name = yield from _word(r, at + 2)
    return bool(name) and (yield from _char(r, at)) in ("", ">")


def _char(r: MarkupReader, at: int) -> Steps[str]:
    """Return the character at offset `at` from the current position; "" after the end of the text."""
    while len(r.buf) - r.at <= at and not r.ended:
        yield
    return r.buf[r.at + at : r.at + at + 1]


def _skip(r: MarkupReader, at: int) -> Steps[tuple[int, str]]:
    """Return the offset after whitespace, and the character there; "" at the end of the text or beyond the limit."""
    return _run(r, at, _SPACE)


def _word(r: MarkupReader, at: int) -> Steps[tuple[int, str]]:
    """Return the offset after a word, and the word."""
    end, _ = yield from _run(r, at, _WORD)
    return end, r.buf[r.at + at : r.at + end]


def _run(r: MarkupReader, at: int, kind: re.Pattern[str]) -> Steps[tuple[int, str]]:
    while True:
        match = kind.match(r.buf, r.at + at, r.at + at + _LOOKAHEAD_LIMIT)
        end = match.end() if match else r.at + at
        if end < len(r.buf) or r.ended or end - r.at - at >= _LOOKAHEAD_LIMIT:
            return end - r.at, r.buf[end : end + 1] if end - r.at - at < _LOOKAHEAD_LIMIT else ""
        yield
