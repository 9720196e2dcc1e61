"""Values in the notations of models (JSON, Python, Gemma), converted to JSON text as they arrive."""

import json
import re
from typing import Final, NamedTuple

from worker.output.parsers.quotes import ends_string
from worker.output.parsers.reader import (
    Emit,
    Malformed,
    MarkerSet,
    MarkupReader,
    Steps,
    collected,
    markers,
    stray,
)

# Maximum nesting: more than any tool needs, and within the limit of every client's JSON parser.
MAX_DEPTH: Final = 128

_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_LOOSE_NUMBER = re.compile(r"[+-]?(?:(?:0|[1-9][0-9_]*)(?:\.[0-9_]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_PADDED = re.compile(r"([+-]?)0+([0-9].*)")
_HEX = re.compile(r"0[xXoObB][0-9a-fA-F]+")
_WORDS: Final = {
    "true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null",
    "NaN": "null", "Infinity": "null", "-Infinity": "null",
}  # fmt: skip
_CLOSERS: Final = {"[": "]", "(": "]", "{": "}"}
_OPENS: Final = {"[": "]", "(": ")", "{": "}"}
# Characters of a string that need no conversion.
_RUNS: Final = {quote: re.compile(rf"[^{quote}\\\x00-\x1f]+") for quote in "\"'"}
_TOKEN = re.compile(r"[^\s,\[\](){}:=\"'<;]+")
_SURROGATE = re.compile("[\ud800-\udfff]")
_ESCAPES: Final = {"'": "'", "a": "\\u0007", "v": "\\u000b", "\n": "", "0": "\\u0000"}
_HEX_ESCAPES: Final = {"x": 2, "u": 4, "U": 8}


class LiteralSyntax(NamedTuple):
    """Notation of values. `delimiter` quotes a raw string (Gemma). `bare` allows keys and values without quotes.

    With `is_python`, the value is part of a Python call, whose strings may contain unescaped quotes.
    """

    delimiter: str = ""
    bare: bool = False
    is_python: bool = False


LOOSE: Final = LiteralSyntax()
PYTHON: Final = LiteralSyntax(is_python=True)
GEMMA: Final = LiteralSyntax('<|"|>', bare=True)
FUNCTION_GEMMA: Final = LiteralSyntax("<escape>", bare=True)


def quoted(text: str) -> str:
    """Return a JSON string with only control characters and lone surrogates escaped."""
    plain = json.dumps(text, ensure_ascii=False)
    return plain if plain.isascii() else _SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", plain)


def escaped(text: str) -> str:
    """Return the JSON escapes of a string, without its quotes."""
    return quoted(text)[1:-1]


def number(token: str) -> str:
    """Return the JSON spelling of a number or word of JSON or Python; raises `Malformed`."""
    if _NUMBER.fullmatch(token):
        return token
    if token in _WORDS:
        return _WORDS[token]
    try:
        if _HEX.fullmatch(token):
            return str(int(token, 0))
        if _LOOSE_NUMBER.fullmatch(token):
            plain = token.replace("_", "")
            return json.dumps(float(plain) if set(plain) & set(".eE") else int(plain), allow_nan=False)
    except (ValueError, OverflowError):
        pass
    raise Malformed


def is_padded(token: str) -> bool:
    """Return whether a token is a number with leading zeros, which may be meant as text, such as a postcode."""
    match = _PADDED.fullmatch(token)
    return bool(match and _LOOSE_NUMBER.fullmatch(match[2]))


def padded(token: str) -> str:
    """Return the JSON spelling like `number`, but also accept leading zeros."""
    return number(_PADDED.sub(r"\1\2", token) if is_padded(token) else token)


def is_string_start(char: str, dialect: LiteralSyntax) -> bool:
    """Return whether a value that begins with `char` is a quoted string."""
    return char in ("'", '"') or (bool(dialect.delimiter) and char == "<")


def value(r: MarkupReader, emit: Emit, dialect: LiteralSyntax = LOOSE) -> Steps[None]:
    """Read one value of any depth and emit it as JSON. Python's tuples and sets become arrays.

    Missing and trailing commas are accepted; the output is strict JSON with one space after `,` and `:`. Raises
    `Malformed`, possibly after a part was emitted.
    """
    open_: list[tuple[str, str]] = []  # closing brackets of each open level, in the input and in the output
    want_value = True
    while want_value or open_:
        char = yield from r.space()
        if want_value:
            want_value = yield from _begin_value(r, char, emit, open_, dialect)
            continue
        source, target = open_[-1]
        if char == source:
            r.take(1)
            open_.pop()
            emit(target)
            continue
        if char == ",":
            r.take(1)
            char = yield from r.space()
        elif target != "}" or char not in _RUNS:
            raise stray(char)
        if char != source:
            emit(", ")
            if target == "}":
                yield from _key(r, emit, dialect, _levels(dialect, open_))
            want_value = True


def _begin_value(
    r: MarkupReader, char: str, emit: Emit, open_: list[tuple[str, str]], dialect: LiteralSyntax
) -> Steps[bool]:
    """Read a scalar, or enter a nested level; return whether a value must follow."""
    if char not in _OPENS or not char:
        yield from scalar(r, char, emit, dialect, _levels(dialect, open_))
        return False
    r.take(1)
    if len(open_) >= MAX_DEPTH:
        raise Malformed
    source, target = _OPENS[char], _CLOSERS[char]
    following = yield from r.space()
    if following == source:
        r.take(1)
        emit(char.replace("(", "[") + target)
        return False
    if char == "{":
        return (yield from _brace(r, following, emit, open_, dialect))
    emit("[")
    open_.append((source, target))
    return True


def _brace(r: MarkupReader, char: str, emit: Emit, open_: list[tuple[str, str]], dialect: LiteralSyntax) -> Steps[bool]:
    """Read what follows a `{`: an object if the first item is a key, otherwise a Python set."""
    if dialect.bare:
        emit("{")
        yield from _key(r, emit, dialect, "")
        open_.append(("}", "}"))
        return True
    if char in _OPENS:
        emit("[")
        open_.append(("}", "]"))
        return True
    levels = _levels(dialect, [*open_, ("}", "}")])
    first = yield from collected(lambda emit: scalar(r, char, emit, dialect, levels, is_key=True))
    following = yield from r.space()
    if following == ":":
        r.take(1)
        emit("{" + (first if first.startswith('"') else quoted(first)) + ": ")
        open_.append(("}", "}"))
        return True
    emit("[" + first)
    open_.append(("}", "]"))
    return False


def _levels(dialect: LiteralSyntax, open_: list[tuple[str, str]]) -> str:
    """Return the closing brackets of a Python call, beginning with the call's own; "" if quotes are always escaped."""
    return ")" + "".join(source for source, _ in open_) if dialect.is_python else ""


def _key(r: MarkupReader, emit: Emit, dialect: LiteralSyntax, levels: str) -> Steps[None]:
    char = yield from r.space()
    if dialect.bare and not is_string_start(char, dialect):
        name, _ = yield from r.capture(_KEY_END, keep=True)
        key = quoted(name.strip())
    else:
        key = yield from collected(lambda emit: scalar(r, char, emit, dialect, levels, is_key=True))
    yield from r.expect(markers(":"))
    emit((key if key.startswith('"') else quoted(key)) + ": ")


def scalar(
    r: MarkupReader, char: str, emit: Emit, dialect: LiteralSyntax = LOOSE, levels: str = "", is_key: bool = False
) -> Steps[None]:
    """Read a string, number or word that begins with `char`, which is not consumed yet.

    `levels` and `is_key` determine where a string with unescaped quotes ends: see `ends_string`.
    """
    if dialect.delimiter and char == "<":
        delimiter = markers(dialect.delimiter)
        yield from r.expect(delimiter)
        emit('"')
        if not (yield from r.until(delimiter, lambda text: emit(escaped(text)))):
            raise Malformed
        emit('"')
    elif char in _RUNS:
        yield from string(r, char, emit, levels, is_key)
    elif dialect.bare:
        word = yield from collected(lambda emit: r.until(_BARE_END, emit, keep=True))
        emit(_bare(word.strip()))
    else:
        emit(padded((yield from token(r))))


_BARE_END: Final[MarkerSet] = markers(",", "}", "]", "<tool_call|>", "<end_function_call>")
_KEY_END: Final[MarkerSet] = markers(":", ",", "}", "]")


def _bare(word: str) -> str:
    try:
        return number(word)
    except Malformed:
        return quoted(word)


def token(r: MarkupReader) -> Steps[str]:
    """Read a run of characters that may be a number or word."""
    parts: list[str] = []
    while True:
        match = _TOKEN.match(r.buf, r.at)
        if match:
            parts.append(r.take(len(match[0])))
        if r.at < len(r.buf) or r.ended:
            return "".join(parts)
        yield


def string(r: MarkupReader, quote: str, emit: Emit, levels: str = "", is_key: bool = False) -> Steps[None]:
    """Read a string in `quote`s, or in three of them as in Python, and emit it as JSON.

    With `levels`, a quote after which the call cannot continue belongs to the string.
    """
    opening = yield from r.peek(3)
    size = 3 if opening == quote * 3 else 1
    r.take(size)
    emit('"')
    run = _RUNS[quote]
    while True:
        match = run.match(r.buf, r.at)
        if match:
            text = r.take(len(match[0]))
            emit(text.replace('"', '\\"') if quote == "'" else text)
        char = yield from r.peek()
        if not char:
            raise Malformed
        if char == "\\":
            r.take(1)
            emit((yield from _escape(r)))
        elif char == quote:
            if size == 1:
                is_end = not levels or (yield from ends_string(r, levels, is_key))
            else:
                is_end = (yield from r.peek(3)) == quote * 3
            if is_end:
                r.take(size)
                break
            emit(escaped(r.take(1)))
        elif char < " ":
            emit(escaped(r.take(1)))
    emit('"')


def _escape(r: MarkupReader) -> Steps[str]:
    """Return the JSON spelling of the escape after a backslash; an unknown escape keeps its backslash, as in Python."""
    char = yield from r.peek()
    if not char:
        raise Malformed
    if char in _HEX_ESCAPES:
        size = _HEX_ESCAPES[char] + 1
        text = yield from r.peek(size)
        try:
            code = int(text[1:], 16) if len(text) == size and text[1:].isalnum() else -1
        except ValueError:
            code = -1
        if 0 <= code < 0x110000:
            r.take(size)
            return f"\\u{code:04x}" if code < 0x10000 else chr(code)
        return "\\\\"
    r.take(1)
    if char in '"\\/bfnrt':
        return "\\" + char
    return _ESCAPES.get(char, "\\\\" + escaped(char))
