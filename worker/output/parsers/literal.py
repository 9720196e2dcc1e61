"""Values in the notations of models (JSON, Python, Gemma), converted to JSON text as they arrive."""

import json
import re
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from worker.output.parsers.quotes import CallSyntax, PythonString, Quote, python_space
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
# Matches the next key of an object after a value without quotes, where the comma is missing.
_NEXT_KEY: Final = re.compile(r"[\s;]+([^\W\d][\w.\-]*)\s*[:=](?![:=/])")
_NEXT_KEY_BEGUN: Final = re.compile(r"[\s;]+(?:[^\W\d][\w.\-]*(?:\s*[:=]?))?")
_NEXT_KEY_LIMIT: Final = 256
_WORD_LIMIT: Final = 64
_GAPS: Final = (" ", "\t", "\r", "\n", ";")
_SURROGATE = re.compile("[\ud800-\udfff]")
_ESCAPES: Final = {"'": "'", "a": "\\u0007", "v": "\\u000b", "\n": "", "0": "\\u0000"}
_HEX_ESCAPES: Final = {"x": 2, "u": 4, "U": 8}


class LiteralSyntax(NamedTuple):
    """Notation of values. `delimiter` quotes a raw string (Gemma). `bare` allows keys and values without quotes.

    With `python`, the value is part of a Python call, whose strings may contain unescaped quotes. A value without
    quotes ends before one of `ends`, and where a comma is missing before a key: before one of `keys`, and unless it
    `is_text`, before what looks like a key. A comma ends text only before one of `names`, if there are any.
    """

    delimiter: str = ""
    bare: bool = False
    python: CallSyntax | None = None
    ends: str = ",}]"
    keys: frozenset[str] = frozenset()
    names: frozenset[str] = frozenset()
    is_text: bool = False


LOOSE: Final = LiteralSyntax()
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
    `Malformed`, possibly after a part was emitted, also for a key that is written twice: parsers of JSON differ in
    which of its values they keep.
    """
    open_: list[_Level] = []
    want_value = True
    while want_value or open_:
        char = yield from gap(r, dialect)
        if want_value:
            want_value = yield from _begin_value(r, char, emit, open_, dialect)
            continue
        level = open_[-1]
        if char == level.source:
            if char == ")" and dialect.python and not level.has_comma:
                raise Malformed  # Python reads this as the value without its brackets.
            r.take(1)
            open_.pop()
            emit(level.target)
            continue
        if char and char in separators(dialect):
            level.has_comma = True
            r.take(1)
            char = yield from gap(r, dialect)
        elif level.target != "}" or not (yield from may_begin_key(r, char, dialect)):
            raise stray(char)
        if char != level.source:
            emit(", ")
            if level.target == "}":
                yield from _key(r, emit, dialect, open_)
            want_value = True


@dataclass(slots=True)
class _Level:
    """Level of an open bracket: the brackets that close it in the input and in the output, and its keys so far."""

    source: str
    target: str
    keys: set[str] = field(default_factory=set[str])
    has_comma: bool = False


def gap(r: MarkupReader, dialect: LiteralSyntax) -> Steps[str]:
    """Consume whitespace, and comments in Python; return the character after them, "" at the end of the text."""
    return (yield from python_space(r) if dialect.python else r.space())


def separators(dialect: LiteralSyntax) -> str:
    """Return the characters that may separate members; models write Python's semicolons between values without
    quotes."""
    return ",;" if dialect.bare else ","


def may_begin_key(r: MarkupReader, char: str, dialect: LiteralSyntax) -> Steps[bool]:
    """Return whether a key may begin with `char`, where the comma before it is missing."""
    if dialect.delimiter and char == "<":
        return (yield from r.peek(len(dialect.delimiter))) == dialect.delimiter
    return char in _RUNS or (dialect.bare and (char.isalpha() or char == "_"))


def _begin_value(r: MarkupReader, char: str, emit: Emit, open_: list[_Level], dialect: LiteralSyntax) -> Steps[bool]:
    """Read a scalar, or enter a nested level; return whether a value must follow."""
    if char not in _OPENS or not char:
        yield from scalar(r, char, emit, dialect, _levels(dialect, open_))
        return False
    r.take(1)
    if len(open_) >= MAX_DEPTH:
        raise Malformed
    source, target = _OPENS[char], _CLOSERS[char]
    following = yield from gap(r, dialect)
    if following == source:
        r.take(1)
        emit(char.replace("(", "[") + target)
        return False
    if char == "{":
        return (yield from _brace(r, following, emit, open_, dialect))
    emit("[")
    open_.append(_Level(source, target))
    return True


def _brace(r: MarkupReader, char: str, emit: Emit, open_: list[_Level], dialect: LiteralSyntax) -> Steps[bool]:
    """Read what follows a `{`: an object if the first item is a key, otherwise a Python set."""
    if dialect.bare:
        emit("{")
        open_.append(_Level("}", "}"))
        yield from _key(r, emit, dialect, open_)
        return True
    if char in _OPENS:
        emit("[")
        open_.append(_Level("}", "]"))
        return True
    levels = _levels(dialect, [*open_, _Level("}", "}")])
    first = yield from collected(lambda emit: scalar(r, char, emit, dialect, levels, is_key=True))
    following = yield from gap(r, dialect)
    if following == ":":
        r.take(1)
        key = first if first.startswith('"') else quoted(first)
        emit("{" + key + ": ")
        open_.append(_Level("}", "}", {json.loads(key)}))
        return True
    emit("[" + first)
    open_.append(_Level("}", "]"))
    return False


def _levels(dialect: LiteralSyntax, open_: list[_Level]) -> str:
    """Return the closing brackets of a Python call, beginning with the call's own; "" if quotes are always escaped."""
    return ")" + "".join(level.source for level in open_) if dialect.python else ""


def _key(r: MarkupReader, emit: Emit, dialect: LiteralSyntax, open_: list[_Level]) -> Steps[None]:
    char = yield from r.space()
    if dialect.bare and not is_string_start(char, dialect):
        name, _ = yield from r.capture(_KEY_END, keep=True)
        key = quoted(name.strip())
    else:
        levels = _levels(dialect, open_)
        key = yield from collected(lambda emit: scalar(r, char, emit, dialect, levels, is_key=True))
        key = key if key.startswith('"') else quoted(key)
    yield from r.expect(_BARE_KEY_END if dialect.bare else markers(":"))
    name = json.loads(key)
    if name in open_[-1].keys:
        raise Malformed
    open_[-1].keys.add(name)
    emit(key + ": ")


def scalar(
    r: MarkupReader, char: str, emit: Emit, dialect: LiteralSyntax = LOOSE, levels: str = "", is_key: bool = False
) -> Steps[None]:
    """Read a string, number or word that begins with `char`, which is not consumed yet.

    `levels` and `is_key` determine where a string with unescaped quotes ends: see `PythonString`.
    """
    if dialect.delimiter and char == "<":
        delimiter = markers(dialect.delimiter)
        yield from r.expect(delimiter)
        emit('"')
        if not (yield from r.until(delimiter, lambda text: emit(escaped(text)))):
            raise Malformed
        emit('"')
    elif char in _RUNS:
        inner = PythonString(char, levels, is_key, dialect.python) if dialect.python and levels else None
        yield from string(r, char, emit, inner)
    elif dialect.bare:
        emit((yield from _bare(r, dialect)))
    else:
        emit(padded((yield from token(r))))


_KEY_END: Final[MarkerSet] = markers(":", "=", ",", "}", "]")
_BARE_KEY_END: Final[MarkerSet] = markers(":", "=")


def _bare(r: MarkupReader, dialect: LiteralSyntax) -> Steps[str]:
    """Read a value without quotes and return it as JSON: a number or word if it is one, else text."""
    ends = markers(*dialect.ends, *_GAPS, "<tool_call|>", "<end_function_call>")
    parts: list[str] = []
    start = r.position
    while (hit := (yield from r.until(ends, parts.append, keep=True))) and hit in (",", *_GAPS):
        is_short = r.position - start <= _WORD_LIMIT
        word = "".join(parts).strip() if is_short else ""
        if (yield from _ends_at_comma(r, word, dialect) if hit == "," else _ends_word(r, word, dialect)):
            break
        parts.append(r.take(1))
    word = "".join(parts).strip()
    # A bracket inside of the word would make the next closing bracket its own.
    if any(opening in word and closing in dialect.ends for opening, closing in _OPENS.items()):
        raise Malformed
    return _bare_json(word) or quoted(word)


def _bare_json(word: str) -> str:
    try:
        return number(word)
    except Malformed:
        return ""


def _ends_word(r: MarkupReader, word: str, dialect: LiteralSyntax) -> Steps[bool]:
    """Return whether a key follows the space or semicolon after `word`, so that a comma is missing. Consumes nothing.

    `word` may be empty instead of a long text, which is no number.
    """
    while True:
        begun = _NEXT_KEY_BEGUN.match(r.buf, r.at, r.at + _NEXT_KEY_LIMIT)
        if begun is None or begun.end() < len(r.buf) or r.ended or begun.end() - r.at == _NEXT_KEY_LIMIT:
            break
        yield
    match = _NEXT_KEY.match(r.buf, r.at, r.at + _NEXT_KEY_LIMIT)
    if not match or match[1] in dialect.keys:
        return match is not None
    gap = match[0][: match.start(1) - match.start()]
    return not dialect.is_text and ("\n" in gap or ";" in gap or bool(_bare_json(word)))


def _ends_at_comma(r: MarkupReader, word: str, dialect: LiteralSyntax) -> Steps[bool]:
    """Return whether a comma after `word` ends the value, which may be text with commas. Consumes nothing.

    Raises `Malformed` if an undeclared key follows without a space, as a key does in the notation.
    """
    if not dialect.names or not dialect.is_text or _bare_json(word) or is_padded(word):
        return True
    following = yield from r.ahead(_key_after_comma(r, dialect), _NEXT_KEY_LIMIT)
    if following is None:
        return False
    is_spaced, key = following
    if not key or key in dialect.names:
        return True
    if not is_spaced and key.isidentifier():
        raise Malformed
    return False


def _key_after_comma(r: MarkupReader, dialect: LiteralSyntax) -> Steps[tuple[bool, str]]:
    """Return the key that follows a comma, "" if it has quotes or a bracket follows, and whether a space precedes it.

    Raises `Malformed` if text without a key follows.
    """
    r.take(1)
    is_spaced = (yield from r.peek()).isspace()
    char = yield from r.space()
    if not char or char in dialect.ends or is_string_start(char, dialect):
        return is_spaced, ""
    key, hit = yield from r.capture(_KEY_END, _NEXT_KEY_LIMIT)
    if hit not in ":=":
        raise Malformed
    return is_spaced, key.strip()


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


def string(r: MarkupReader, quote: str, emit: Emit, inner: PythonString | None = None) -> Steps[None]:
    """Read a string in `quote`s, or in three of them as in Python, and emit it as JSON.

    With `inner`, only a quote that it takes for the end ends the string.
    """
    if (yield from r.peek(3)) == quote * 3:
        quote *= 3
    if inner:
        inner.quote = quote
    r.take(len(quote))
    emit('"')
    run = _RUNS[quote[0]]
    while True:
        if match := run.match(r.buf, r.at):
            text = r.take(len(match[0]))
            emit(text.replace('"', '\\"') if quote[0] == "'" else text)
        elif not (char := (yield from r.peek())):
            raise Malformed
        elif char == "\\":
            r.take(1)
            emit(text := (yield from _escape(r, is_python=inner is not None or quote == "'")))
            if inner:
                inner.note_escape(text)
            continue
        elif (yield from r.peek(len(quote))) != quote:
            emit(escaped(text := r.take(1)))
        elif inner is None or (meaning := (yield from inner.meaning(r))) is Quote.END:
            r.take(len(quote))
            break
        elif meaning is Quote.JOIN:
            r.take(len(quote))
            yield from _next_part(r, quote)
            continue
        else:
            emit(escaped(text := r.take(1)))
        if inner:
            inner.note(text)
    emit('"')


def _next_part(r: MarkupReader, quote: str) -> Steps[None]:
    """Read up to the next part of a string that has several, each in quotes."""
    yield from r.space()
    if not (yield from r.literal(markers(quote))) or (len(quote) == 1 and (yield from r.peek()) == quote):
        raise Malformed


def _escape(r: MarkupReader, *, is_python: bool) -> Steps[str]:
    """Return the JSON spelling of the escape after a backslash; an unknown escape keeps its backslash, as in Python.

    JSON has fewer escapes than Python: there, backslashes of paths, LaTeX and continued lines that the model has not
    escaped are text.
    """
    char = yield from r.peek()
    if not char:
        raise Malformed
    if char in (_HEX_ESCAPES if is_python else "u"):
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
    kept = "\\\\" + escaped(char)
    return _ESCAPES.get(char, kept) if is_python or char == "'" else kept
