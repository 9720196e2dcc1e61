"""Detection of the quote that ends a string, in Python calls with unescaped inner quotes, as in `run(command="grep "x"
y")`.

A quote may end its string if the call can continue after the quote. That is true of every closing quote in valid Python
(except between adjacent strings on one line, which only shells have), so the first such quote ends its string. In a
string that already holds other quotes, code may look like the rest of the call. There, the quotes and brackets in the
string must pair up as well, and only declared tools and parameters may follow. If one sign says that the string ends
and another that it goes on, the call is malformed. The lookahead stops at the next quote at the latest.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Protocol

from worker.output.parsers.reader import Malformed, MarkupReader, Steps, collected, markers

# Maximum lookahead in characters: more than any padding, and than the numbers between two strings of usual calls.
_LOOKAHEAD_LIMIT: Final = 1024
_SAME_LINE_LIMIT: Final = 256
_NAME: Final = re.compile(r"[\w.\-:/@$]+")
_KEY: Final = re.compile(r"[\w.\-]+")
_WORD: Final = re.compile(r"[\w.+\-]+")
_NUMBER: Final = re.compile(r"[+-]?\.?[0-9][\w.]*(?:(?<=[eE])[+-][0-9]+)?")
_CONSTANTS: Final = frozenset({
    "True", "False", "None", "true", "false", "null", "nan", "NaN", "inf", "Infinity", "-Infinity",
})  # fmt: skip
_OPERATORS: Final = frozenset("|&;<>=)]},.:'\"+%/\\")
_CLOSERS: Final = {"[": "]", "(": ")", "{": "}"}
_METHOD: Final = re.compile(r"\.[^\W\d]\w*\(")
_METHOD_LIMIT: Final = 64
# Matches what ends a list of calls, after a string.
_LIST_END: Final = re.compile(r"[\"'][\s\]})]*\)\s*\]")
_STRING_PREFIX: Final = re.compile(r"(?:^|\W)[fFrRbBuU]{1,2}$")
_SPACES: Final = ("\\n", "\\r", "\\t")
_TIGHT_OPERATORS: Final = frozenset("+%*[")
_BEFORE_OPENING: Final = frozenset("([{,=: \t\r\n")
_ON_LINE_BEFORE_OPENING: Final = _BEFORE_OPENING - {"\r", "\n"}
_AFTER_CLOSING: Final = frozenset(")]},;:.|&> \t\r\n")
# Match a quoted separator, as in `cut -d","`, and what comes before it.
_SEPARATOR: Final = re.compile(r"([\"'])[^\w\s\"']{1,6}\1")
_OPTION: Final = re.compile(r"\s-\w$")
_BEFORE_SEPARATOR: Final = re.compile(r"(?:^|[\s=]|(?:^|\s)-\w)$")
# Match text in the other kind of quotes, whose brackets do not count.
_QUOTED: Final[Mapping[str, re.Pattern[str]]] = {"'": re.compile(r'"[^"\n]*"'), '"': re.compile(r"'[^'\n]*'")}


class Signatures(Protocol):
    """Declared tools and their parameters."""

    def allows(self, name: str, key: str) -> bool:
        """Return whether a call of tool `name` with argument `key` (without any, if it is empty) is declared."""
        ...


@dataclass(slots=True)
class CallSyntax:
    """Notation of the list of calls, and state of the argument that is being read.

    `ends` are the markers after the list. `keys` are the parameters that the call may still get; None if any.
    """

    tools: Signatures
    ends: tuple[str, ...] = ()
    keys: frozenset[str] | None = None
    # Whether strings of the argument hold inner quotes, and whether some end where a quotation could begin.
    has_inner_quotes: bool = False
    has_open_end: bool = False


class Quote(Enum):
    """Meaning of a quote in a string."""

    INNER = "text of the string"
    END = "end of the string"
    JOIN = "end of a part of the string: another part follows on another line"


class _Next(Enum):
    """Kind of the text that follows a quote."""

    TEXT = "text that cannot follow a string"
    BROKEN = "a comma or a bracket, and then text that cannot follow it"
    EXPRESSION = "the rest of an expression"
    STRING = "another string, on another line"
    UNDECLARED = "an argument or a call that is not declared"
    DECLARED = "another value, argument or call"
    END = "the end of the calls"


@dataclass(slots=True)
class PythonString:
    """String of a call that is being read, with what its quotes and brackets so far say about its end.

    `levels` are the brackets that close the open levels; the first is the call's. With `is_key`, a colon may follow.
    """

    quote: str
    levels: str
    is_key: bool
    syntax: CallSyntax
    # Number of inner quotes, and of quotations in the string that are not closed yet.
    _inner: int = 0
    _nesting: int = 0
    # Number of brackets that are open in the string: outside of quotations, and all.
    _outside: int = 0
    _brackets: int = 0
    # Text since the last quote, and the end of the text before it.
    _segment: list[str] = field(default_factory=list[str])
    _tail: str = ""

    def note(self, text: str) -> None:
        """Record text of the string."""
        self._segment.append(text)

    def note_escape(self, text: str) -> None:
        """Record an escape, which is no bracket. White space that no quotation holds may be before a quotation."""
        self._segment.append("\n" if text in _SPACES and not self._nesting else "\\")

    def meaning(self, r: MarkupReader) -> Steps[Quote]:
        """Return the meaning of the quote that comes next. Consumes nothing.

        Raises `Malformed` if it cannot be known, or if the string is part of an expression.
        """
        size = len(self.quote)
        text = yield from r.peek(size + 7)
        lookahead = _Lookahead(r, list(self.levels), self.syntax, is_strict=not self._inner)
        following = yield from r.ahead(lookahead.read(size, self.is_key), _LOOKAHEAD_LIMIT)
        segment = "".join(self._segment)
        before, after, brackets = (self._tail + segment)[-3:], text[size:], self._count(segment)
        if following is _Next.STRING and not self._inner:
            if (not before or before[-1] in _BEFORE_OPENING) and after[1:].startswith(self.quote):
                raise Malformed  # It may also be a line break in quotes.
            return Quote.JOIN
        if not self._inner and after[:1] in _TIGHT_OPERATORS and before[-1:] not in _BEFORE_OPENING:
            raise Malformed
        if following is _Next.BROKEN and _SEPARATOR.match(text) and _BEFORE_SEPARATOR.search(before):
            following = _Next.TEXT
        if self._is_end(following or _Next.DECLARED, brackets):
            if following is _Next.DECLARED and self._inner and before[-1:] in _ON_LINE_BEFORE_OPENING:
                raise Malformed
            self._check_list(before)
            return Quote.END
        self._brackets += brackets
        self._outside += 0 if self._nesting else brackets
        self._segment.clear()
        self._tail = before
        if not self._is_stray(before, after):
            self._enter_or_leave(before, after)
        return Quote.INNER

    def _is_end(self, following: _Next, brackets: int) -> bool:
        """Return whether a quote ends the string, by what follows it and the `brackets` since the last inner quote."""
        is_outside = not self._nesting
        is_balanced = (self._outside if is_outside else self._brackets) + brackets <= 0
        match following:
            case _Next.TEXT | _Next.STRING:
                return False
            case _Next.BROKEN | _Next.EXPRESSION:
                is_doubtful = is_outside and is_balanced
            case _ if not self._inner:
                return True
            case _Next.UNDECLARED:
                is_doubtful = not self._nesting % 2 and is_balanced
            case _:
                if is_balanced and is_outside:
                    return True
                is_doubtful = is_outside or is_balanced
        if is_doubtful:
            raise Malformed
        return False

    def _check_list(self, before: str) -> None:
        """Raise `Malformed` if the separators of a list may be quoted text: where inner quotes are not escaped, the
        string in `["print(", "x")"]` may be one or two."""
        self.syntax.has_inner_quotes |= self._inner > 0
        self.syntax.has_open_end |= not before or before[-1] in _BEFORE_OPENING or _OPTION.search(before) is not None
        if len(self.levels) > 1 and self.syntax.has_inner_quotes and self.syntax.has_open_end:
            raise Malformed

    def _count(self, segment: str) -> int:
        """Return the number of brackets that `segment` opens and does not close."""
        if len(self.quote) > 1:
            return 0  # The segments of such a string hold quotes of all kinds.
        plain = _QUOTED[self.quote].sub("", segment)
        return sum(map(plain.count, _CLOSERS)) - sum(map(plain.count, _CLOSERS.values()))

    def _is_stray(self, before: str, after: str) -> bool:
        """Return whether an inner quote opens and closes nothing: an apostrophe, or a sign behind a word as in `5"`."""
        if len(self.quote) > 1 and after[:1] == self.quote[0]:
            return True  # The string ends with a quote, which three others follow.
        if after[:1].isspace():
            return not self._nesting and before[-1:] not in {"", *_BEFORE_OPENING} and after[1:2] != self.quote
        is_in_word = self.quote == "'" and _is_word(before[-1:]) and _is_word(after[:1])
        return is_in_word and not _STRING_PREFIX.search(before)

    def _enter_or_leave(self, before: str, after: str) -> None:
        """Count an inner quote. It opens a quotation in a quotation only if it cannot close one."""
        opens = not before or before[-1] in _BEFORE_OPENING
        closes = not after or after[0] in _AFTER_CLOSING
        self._nesting += 1 if not self._nesting or (opens and not closes) else -1
        self._inner += 1


def _is_word(char: str) -> bool:
    return char.isalnum() or char == "_"


def follows_call(r: MarkupReader, syntax: CallSyntax) -> Steps[bool]:
    """Return whether another call or the end of the calls follows a call. Consumes nothing."""
    return bool((yield from r.ahead(_Lookahead(r, [], syntax, is_strict=True).is_between_calls(), _LOOKAHEAD_LIMIT)))


def python_space(r: MarkupReader) -> Steps[str]:
    """Consume whitespace and comments; return the character after them. Raises `Malformed` if no line break ends a
    comment."""
    while (char := (yield from r.space())) == "#":
        if not (yield from r.until(markers("\n"), _drop)):
            raise Malformed
    return char


def _drop(_: str) -> None:
    """Ignore a comment."""


@dataclass(slots=True)
class _Lookahead:
    """Reader of the rest of the calls up to the next string, which consumes what it reads.

    `levels` are the brackets that close the open levels. With `is_strict`, the text before was valid Python.
    """

    r: MarkupReader
    levels: list[str]
    syntax: CallSyntax
    is_strict: bool
    # Name of the call that was read last; empty for the string's own.
    _tool: str = ""
    _is_declared: bool = True

    def read(self, quote_size: int, is_key: bool) -> Steps[_Next]:
        """Read what follows the quote of `quote_size` characters that comes next."""
        r = self.r
        r.take(quote_size)
        char, gap = yield from self._gap()
        if char and char in "+%." and (yield from self._is_expression(char, gap)):
            return _Next.EXPRESSION
        if self.is_strict and "\n" in gap and char and char in "\"'":
            return _Next.STRING
        if char == ":" and is_key:
            return _Next.DECLARED
        if char == "#" and not gap:
            return _Next.TEXT
        is_structure = char in (",", self.levels[-1])
        try:
            following = yield from self._rest()
        except Malformed:
            following = _Next.TEXT
        return _Next.BROKEN if is_structure and following is _Next.TEXT else following

    def is_between_calls(self) -> Steps[bool]:
        """Return whether a call has ended here, by what follows it."""
        if (yield from self._separated()) in ("", "]"):
            return True
        return (yield from self._is_marker()) or (yield from self._begins_call())

    def _rest(self) -> Steps[_Next]:
        """Read what follows a value, up to the next string or the end of the calls."""
        r = self.r
        while True:
            char = (yield from self._space()) if self.levels else (yield from self._separated())
            if not char or (yield from self._is_marker()):
                return self._found(_Next.END)
            if not self.levels:
                if char == "]":
                    return self._found(_Next.END) if (yield from self._is_list_end()) else _Next.TEXT
                if not (yield from self._begins_call()):
                    return _Next.TEXT
            elif char == self.levels[-1]:
                self.levels.pop()
                r.take(1)
                continue
            elif char == "," or (char == ":" and self.levels[-1] == "}"):
                r.take(1)
            else:
                return _Next.TEXT
            if (yield from self._space()) != self.levels[-1] and (following := (yield from self._item())):
                return following

    def _item(self) -> Steps[_Next | None]:
        """Read an argument, or a value in brackets, up to a string; return None after the value if it has none."""
        r = self.r
        if len(self.levels) == 1:
            key = yield from self._word(_KEY)
            char = yield from r.space()
            if char and (not key or char != "=" or (yield from r.peek(2)) == "=="):
                return _Next.TEXT
            r.take(len(char))
            self._is_declared = self._is_declared and self._has(key)
        while (char := (yield from self._space())) and char in _CLOSERS:
            r.take(1)
            self.levels.append(_CLOSERS[char])
        if not char:
            return self._found(_Next.END)
        if char in "\"'":
            return self._found(_Next.DECLARED)
        if char == self.levels[-1]:
            return None
        word = yield from self._word(_WORD)
        return None if word in _CONSTANTS or _NUMBER.fullmatch(word) else _Next.TEXT

    def _begins_call(self) -> Steps[bool]:
        """Read the name and the bracket of a call; return whether they come next."""
        r = self.r
        self._tool = yield from self._word(_NAME)
        bracket = yield from r.peek()
        if not self._tool or bracket not in ("", "("):
            return False
        r.take(len(bracket))
        self.levels.append(")")
        self._is_declared = self._is_declared and self.syntax.tools.allows(self._tool, "")
        return True

    def _has(self, key: str) -> bool:
        if self._tool:
            return self.syntax.tools.allows(self._tool, key)
        return self.syntax.keys is None or key in self.syntax.keys

    def _found(self, following: _Next) -> _Next:
        return following if self._is_declared else _Next.UNDECLARED

    def _is_list_end(self) -> Steps[bool]:
        """Read the bracket that ends a list and what follows it; return whether this may follow a list.

        Text may follow on its own line, or on the same line. On the same line it must not begin with an operator, which
        would continue a command inside the string, nor hold another end of a list.
        """
        r = self.r
        r.take(1)
        char, gap = yield from self._gap()
        if not char or "\n" in gap or (yield from self._is_marker()):
            return True
        line = yield from collected(lambda emit: r.until(markers("\n"), emit, _SAME_LINE_LIMIT))
        return char not in _OPERATORS and not _LIST_END.search(line)

    def _is_marker(self) -> Steps[bool]:
        """Return whether a marker comes next, which may also show that closing brackets are missing. Consumes it."""
        if (yield from self.r.literal(markers(*self.syntax.ends))):
            return True
        return (yield from self.r.peek(2)) in ("<", "<|", "<｜")

    def _is_expression(self, operator: str, gap: str) -> Steps[bool]:
        """Return whether `"a" + b`, `"%s" % x` or `"a".join(b)` is an expression, whose value cannot be known."""
        text = yield from self.r.peek(2 if operator != "." else _METHOD_LIMIT)
        return text[1:].isspace() if operator != "." else not gap and _METHOD.match(text) is not None

    def _separated(self) -> Steps[str]:
        """Read what may separate calls; return the character after it."""
        char = yield from self._space()
        if char and char in ",;":
            self.r.take(1)
            char = yield from self._space()
        return char

    def _gap(self) -> Steps[tuple[str, str]]:
        """Read whitespace; return the character after it, and the whitespace."""
        r, start = self.r, self.r.position
        char = yield from r.space()
        return char, r.buf[r.at - (r.position - start) : r.at]

    def _space(self) -> Steps[str]:
        return (yield from python_space(self.r) if self.is_strict else self.r.space())

    def _word(self, kind: re.Pattern[str]) -> Steps[str]:
        """Read the longest run of characters of this kind."""
        r, parts = self.r, list[str]()
        while True:
            if match := kind.match(r.buf, r.at):
                parts.append(r.take(len(match[0])))
            if r.at < len(r.buf) or r.ended:
                return "".join(parts)
            yield
