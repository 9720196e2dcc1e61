"""Notation of calls as tags around plain text: how a call and each of its parameters begin.

Values between tags: which markers in the text of a value end it, and which are a part of it.

A marker ends a value only if the call can continue after it: with a parameter, with the end of the call, or with the
end of the output.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import lru_cache
from typing import Final, NamedTuple

from worker.output.parsers.call import LOOKAHEAD_LIMIT, NAME_LIMIT, ParserContext, checked, drop
from worker.output.parsers.reader import REPEAT_LIMIT, Emit, Malformed, MarkerSet, MarkupReader, Steps, markers
from worker.output.parsers.schema import Parameters, Types

_ATTRIBUTE = re.compile(r"([\w:]+)\s*=\s*(?:\"([^\"]*)\"|'([^']*)'|([^\s\"'>]+))")
_KEY = re.compile(r"[^<>\n]+")
# Matches what models write into an end marker: nothing, or as group 1 the name or key that it ends.
_END_LABEL = re.compile(r"\s*(?:(?:=|(?<=\s)(?:\w+\s*=)?)\s*[\"']?([\w.\-:/@$]+)[\"']?\s*)?")
_END_LABEL_LIMIT: Final = 64
# Minimum number of characters that show a marker.
_CUT_MIN: Final = 2
# Matches the places within a marker of several tags.
_JOINT = re.compile(r"(?<=>)(?!$)|(?<!^)(?=<)")
# Match the first letter of a marker, and what stands before the name in a tag that is no control token.
_FIRST_LETTER = re.compile(r"[a-z]")
_TAG_NAME = re.compile(r"</?(?=[A-Za-z])")
_SEPARATOR: Final = "<|sep|>"
# Parts of markers that models leave out.
_NAMESPACE = re.compile("｜DSML｜|atem:|steptml:")


class TagHead(NamedTuple):
    """Head of a call: its name, the key of a parameter that follows without its start marker, and whether the tag is
    closed itself, so that the call has no parameters.
    """

    name: str
    key: str = ""
    is_closed: bool = False


class EndTags(NamedTuple):
    """End marker in its parts: before `closing`, models may write blanks and a name; `rest` are further tags."""

    stem: str
    closing: str
    rest: str


class ParameterStart(NamedTuple):
    """Start of a parameter, which is consumed. `label` is the text of its tag; `ends` are the markers of its end.

    `is_whole` means that no marker is missing, `is_own` that it is spelled as the format demands, `is_empty` that the
    tag is closed itself, so that it has no value.
    """

    key: str
    label: str
    ends: tuple[str, ...]
    is_whole: bool = True
    is_own: bool = True
    is_empty: bool = False


@dataclass(frozen=True, slots=True)
class XmlNotation:
    """Notation `wrap` `call` name `head_end` (`param` key `key_end` value `param_end`)* `call_end` `wrap_end`.

    A name or key is the text of its tag, or the tag's attribute `name`, `tool` or `key`. An empty `wrap` means that
    calls have no wrapper; `call_alone` makes the wrapper optional. With `strip_line`, which families have whose
    template writes them, the first and last line break of a value belong to the markup. Between `json_block` and
    `json_end`, all arguments are one object; `json` means that the call may be JSON.
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
    json: bool = False
    cdata: bool = False
    json_block: str = ""
    json_end: str = ""

    @property
    def starts(self) -> tuple[str, ...]:
        is_alone = self.call and (self.call_alone or not self.wrap)
        return self.wrap + (with_line_breaks(self.call) if is_alone else ())

    @property
    def openers(self) -> tuple[str, ...]:
        """Markers that may begin a call, in a wrapper too."""
        return (*self.wrap, *with_line_breaks(self.call))

    @property
    def inner_starts(self) -> tuple[str, ...]:
        """Markers that begin a call in a wrapper, in any spelling."""
        return tuple(text for marker in with_line_breaks(self.call) for text in all_spellings(marker))

    @property
    def inner_ends(self) -> tuple[str, ...]:
        """Markers that end a call in any spelling."""
        return tuple(text for marker in self.ends for text in all_spellings(marker))

    @property
    def ends(self) -> tuple[str, ...]:
        return (self.call_end, *self.wrap_end)

    def call_end_or_cut(self, r: MarkupReader) -> Steps[str]:
        """Read an end marker of a call or wrapper in any spelling, or its beginning at the end of the output."""
        if (yield from cut_end(r, self.ends, (self.param, self.param_end))):
            return self.ends[-1]
        return (yield from end_tag(r, self.inner_ends))

    def head(self, ctx: ParserContext) -> Steps[TagHead]:
        """Read a call's name and the marker after it, which may be written again."""
        head = yield from self._head(ctx)
        while self.call and (yield from ctx.r.ahead(self._next_head(ctx), LOOKAHEAD_LIMIT)) == head:
            yield from self._next_head(ctx)
        return head

    def _next_head(self, ctx: ParserContext) -> Steps[TagHead]:
        yield from ctx.r.expect(markers(*self.inner_starts))
        return (yield from self._head(ctx))

    def _head(self, ctx: ParserContext) -> Steps[TagHead]:
        if self.call:
            yield from ctx.r.again(markers(*self.inner_starts))
        glued = self.key_end if self.value and not self.call else ""
        text, closing = yield from ctx.r.capture(markers(*self.head_end, glued), NAME_LIMIT, keep=True)
        if closing == glued:
            if not (pair := ctx.tools.name_and_parameter(text.strip())):
                raise Malformed
            yield from ctx.r.literal(markers(closing))
            return TagHead(*pair)
        if "<" in text:
            raise Malformed
        if self.call or closing == "\n":
            yield from ctx.r.literal(markers(closing))
        is_attribute = self.call and not self.call.endswith(("=", ">"))
        text, is_closed = _opened(text) if self.call else (text, False)
        name = attribute(text, "name", "tool") or ("" if is_attribute else text.strip().removeprefix("="))
        return TagHead(checked(name), is_closed=is_closed)

    def opening(self, r: MarkupReader, params: Parameters) -> Steps[ParameterStart | None]:
        """Read the start of a parameter; None if there is none here. Raises `Malformed` for half a start.

        Markers without their namespace and tags that are named after declared parameters start one too.
        """
        names = params.names
        starts = markers(*spellings(self.param), *spaced(self.param))
        own = yield from r.literal(starts)
        if own:
            yield from r.again(starts)
            key_ends = (self.key_end, *spaced(self.key_end)) if self.value else (self.key_end,)
            label, hit = yield from r.capture(markers(*key_ends, self.value), NAME_LIMIT)
            if "<" in label:
                raise Malformed
            if self.value and hit != self.value:
                yield from r.again(markers(*key_ends))
            key = self._key(_opened(label)[0], params)
            is_own = own == self.param
            if not key or (not is_own and key not in names):
                raise Malformed
            return (yield from self.after_key(r, key, label, hit == self.value, is_own))
        if self.value:
            if not (hit := (yield from r.literal(markers(*(key + self.key_end for key in names))))):
                return None
            opening = yield from self.after_key(r, hit.removesuffix(self.key_end), "")
            if not opening.is_whole:
                raise Malformed
            return opening
        if tag := (yield from r.literal(markers(*(f"<{key}>" for key in names)))):
            return ParameterStart(tag[1:-1], "", (f"</{tag[1:-1]}>",), is_own=False)
        return None

    def after_key(
        self, r: MarkupReader, key: str, label: str, has_value: bool = False, is_own: bool = True
    ) -> Steps[ParameterStart]:
        """Read the marker between a key and its value, which is optional."""
        if self.value and not has_value:
            yield from r.space()
            has_value = bool((yield from r.literal(markers(self.value, *spaced(self.value)))))
        ends, label, is_empty = spellings(self.param_end), *_opened(label)
        return ParameterStart(key, label, ends, has_value or not self.value, is_own, is_empty)

    def begins(self, ctx: ParserContext, is_declared: bool = False) -> Steps[bool]:
        """Return whether the whole start of a call comes next, up to its first parameter or its end. Consumes it.

        With `is_declared`, the call must be one of a declared tool, if there are any.
        """
        r = ctx.r
        start = yield from r.literal(markers(*self.openers))
        if not start:
            return False
        char = yield from r.space()
        if self.json and char in ("{", "["):
            return True
        if self.call and start in self.wrap and not (yield from r.literal(markers(*self.inner_starts))):
            return False
        try:
            head = yield from self.head(ctx)
            if is_declared and ctx.tools and ctx.tools.declared(head.name) not in ctx.tools:
                return False
            char = yield from r.space()
            return bool(head.key or head.is_closed or char in ("", "{") or (yield from self.is_body(r)))
        except Malformed:
            return False

    def follows_wrapper(self, ctx: ParserContext) -> Steps[bool]:
        """Return whether the start of a call follows the start of a wrapper: on a line of its own, or of a declared
        tool.
        """
        r = ctx.r
        gap, _ = yield from r.capture(markers(*self.inner_starts))
        if gap.strip():
            return False
        head = yield from self.head(ctx)
        char = yield from r.space()
        is_call = head.is_closed or char == "{" or (yield from self.is_body(r))
        return is_call and ("\n" in gap or ctx.tools.declared(head.name) in ctx.tools)

    def is_body(self, r: MarkupReader) -> Steps[bool]:
        """Return whether any parameter or the end of a call comes next. Consumes it."""
        if (yield from self.opening(r, _ANY_PARAMETERS)):
            return True
        return bool((yield from r.literal(markers(self.json_block))) or (yield from end_tag(r, self.ends)))

    def _key(self, label: str, params: Parameters) -> str:
        """Return the key in a tag; "" if it has none."""
        key = attribute(label, "name", "key")
        text = label.strip().removeprefix("=").strip().strip("\"'")
        # A tag with attributes may hold the text of a key only where this key is declared.
        key = key or (text if self.param.endswith(("=", ">")) or text in params.names else "")
        return key if key in params.names or _KEY.fullmatch(key) else ""


_ANY_PARAMETERS: Final = Parameters({})


def end_words(r: MarkupReader, ends: Sequence[str]) -> dict[str, str]:
    """Return the texts with which these end markers begin in any spelling, and the marker that each stands for."""
    words: dict[str, str] = {}
    for marker in ends:
        stem, closing, _ = end_tags(marker)
        # A marker that is no tag, or a token, or ends with one, has no other spelling.
        is_exact = not closing or r.controls.offsets(stem + closing) != r.controls.offsets(stem)
        words[marker if is_exact else stem] = marker
    return words


def end_tag(r: MarkupReader, ends: Sequence[str], key: str = "") -> Steps[str]:
    """Read one of these end markers and return it; "" if there is none here. Raises `Malformed` for half a marker.

    The marker may hold blanks and the name that it ends, which is `key` if that is given.
    """
    words = end_words(r, ends)
    if not (word := (yield from r.literal(markers(*words)))):
        return ""
    _, closing, rest = end_tags(words[word])
    if word != words[word]:
        label, hit = yield from r.capture(markers(closing, "<"), _END_LABEL_LIMIT)
        match = _END_LABEL.fullmatch(label)
        if hit != closing or not match or (key and match[1] not in (None, key)):
            raise Malformed
        for tag in filter(None, _JOINT.split(rest)):
            yield from r.space()
            if (yield from r.literal(markers(tag))):
                yield from r.again(markers(tag))
    return words[word]


def cut_end(r: MarkupReader, ends: Sequence[str], others: Sequence[str]) -> Steps[bool]:
    """Read the beginning of one of these end markers, and of none of the `others`, with which the output ends."""
    known = markers(*ends)
    while True:
        rest = r.buf[r.at : r.at + known.longest]
        if not known.words or (rest and rest not in known.prefixes):
            return False
        if r.ended:
            break
        yield
    if len(rest) < _CUT_MIN or rest in markers(*others).prefixes:
        return False
    r.take(len(rest))
    return True


def ends_again(r: MarkupReader, ends: Sequence[str]) -> Steps[None]:
    """Consume further end markers, and the whitespace before them."""
    while (yield from r.ahead(_next_end(r, ends), REPEAT_LIMIT)):
        yield from _next_end(r, ends)


def _next_end(r: MarkupReader, ends: Sequence[str]) -> Steps[str]:
    yield from r.space()
    return (yield from end_tag(r, ends))


@lru_cache(maxsize=64)
def spellings(marker: str) -> tuple[str, ...]:
    """Return the marker, and its other spellings: without its namespace, with an attribute, and in capital letters."""
    texts = [marker, _NAMESPACE.sub("", marker)]
    texts += [text.removesuffix("=") + " " for text in texts if text.endswith("=")]
    return tuple(dict.fromkeys([*texts, *map(str.upper, texts)]))


def all_spellings(marker: str) -> tuple[str, ...]:
    """Return the marker of a call and its spellings, also those of `restyled`."""
    return tuple(dict.fromkeys([*spellings(marker), *restyled(marker)]))


@lru_cache(maxsize=64)
def restyled(marker: str) -> tuple[str, ...]:
    """Return the spellings of a marker in capital letters, and with a blank before the name of its tag."""
    first_capital = _FIRST_LETTER.sub(lambda hit: hit[0].upper(), marker, count=1)
    texts = [marker, marker.upper(), marker.title(), first_capital]
    texts += [_TAG_NAME.sub(r"\g<0> ", text) for text in texts if _TAG_NAME.match(text)]
    return tuple(dict.fromkeys(texts))[1:]


def end_beginnings(marker: str) -> tuple[str, ...]:
    """Return the texts one of which any spelling of an end marker begins with, except those of `spellings`."""
    tags = [end_tags(text) for text in spellings(marker)]
    return tuple(tag.stem + follows for tag in tags for follows in (" ", "\t", "\n", "\r", "="))


def spaced(tag: str) -> tuple[str, ...]:
    """Return the spelling of a whole tag with a blank at its end."""
    return (tag[:-1] + " >",) if tag.endswith(">") and not tag.endswith(("|>", "｜>", " >")) else ()


def _opened(label: str) -> tuple[str, bool]:
    """Return the text of a tag without the slash of a tag that closes itself, and whether it had one."""
    text = label.rstrip()
    return (text[:-1], True) if text.endswith("/") else (label, False)


@lru_cache(maxsize=64)
def with_line_breaks(marker: str) -> tuple[str, ...]:
    """Return the marker, and its spellings with line breaks between its tags."""
    texts = [""]
    for tag in _JOINT.split(marker):
        texts = [text + gap + tag for text in texts for gap in (("", "\n") if text else ("",))]
    return tuple(texts)


@lru_cache(maxsize=64)
def end_tags(marker: str) -> EndTags:
    if marker.endswith(_SEPARATOR):
        return EndTags(marker.removesuffix(_SEPARATOR), _SEPARATOR, "")
    return EndTags(*marker.partition(">"))


def attribute(head: str, *names: str) -> str:
    """Return the first of these attributes in a tag, with XML's two common entities resolved."""
    if "=" not in head:
        return ""
    for match in _ATTRIBUTE.finditer(head):
        if match[1].lower() in names:
            text = match[2] or match[3] or match[4] or ""
            return text.replace("&quot;", '"').replace("&amp;", "&")
    return ""


# Maximum number of characters of text after a call in which another end of the same call is searched.
_TEXT_LIMIT: Final = 256
# Matches the head of a call between its markers.
_QUOTED_HEAD = re.compile(r"\s*(?:[\w.\-:/@$]+|(?:\s*[\w:]+=(?:\"[^\"<]*\"|'[^'<]*'|[^\s\"'<>]+))+)\s*")
# Matches a tag after the name, which some of the families have that write keys and values in tags.
_HEAD_TAG = re.compile(r"<[^<>\n]*>\s*\Z")
CDATA: Final = "<![CDATA["
_CDATA_END: Final = "]]>"
_LINE_BREAKS: Final = ("\r\n", "\n")


class _Meaning(Enum):
    """Meaning of a marker in a value: its end or text. `OPENS` and `CLOSES` are text: a call that the value quotes."""

    TEXT = auto()
    OPENS = auto()
    CLOSES = auto()
    END = auto()
    END_IS_MISSING = auto()


class _CallEnd(NamedTuple):
    """End of a call: its position in the whole text, and whether it is spelled as the format demands and includes the
    end of the wrapper.
    """

    position: int
    is_own: bool
    is_wrap_closed: bool


@dataclass(slots=True)
class CallState:
    """Call that is being read. `given` are the keys of its parameters, `quoted` the declared ones whose starts stand in
    its values; `is_repaired` means that the end marker of a value was missing.
    """

    ctx: ParserContext
    params: Parameters
    is_wrapped: bool
    given: list[str] = field(default_factory=list[str])
    quoted: set[str] = field(default_factory=set[str])
    is_repaired: bool = False


@dataclass(slots=True)
class ValueReader:
    """Reader of one value, whose start is consumed. `types` are the types that the value may have."""

    form: XmlNotation
    call: CallState
    opening: ParameterStart
    types: Types
    is_line: bool = False
    is_cdata: bool = False
    # Number of calls that the value quotes and that are still open.
    depth: int = 0
    has_quoted_end: bool = False
    # Whether a parameter that the call does not have yet was read as part of a quoted call.
    has_quoted_parameter: bool = False
    # Outside of quoted calls: whether an end of the value or call was read as text, and how many starts of parameters
    # are quoted without their end.
    has_text_end: bool = False
    open_parameters: int = 0
    # Position of the text in the whole text, and whether the start of the value is written again there.
    text_start: int = 0
    has_start_again: bool = False

    @property
    def has_markup(self) -> bool:
        """Whether markers of the family's parameters or calls were read as text outside of quoted calls."""
        return self.has_text_end or self.open_parameters > 0

    def start(self) -> Steps[None]:
        """Read the markup between the start of the parameter and its text."""
        r, form = self.call.ctx.r, self.form
        if self.types and "string" not in self.types:
            # No value of these types begins with its own start.
            while (yield from r.ahead(self._start_again(), NAME_LIMIT)):
                yield from self._start_again()
        self.is_line = form.strip_line and bool((yield from r.literal(markers(*_LINE_BREAKS))))
        self.is_cdata = form.cdata and bool((yield from r.literal(markers(CDATA))))

    def _start_again(self) -> Steps[bool]:
        r, form = self.call.ctx.r, self.form
        yield from r.space()
        if form.value and (yield from r.literal(markers(form.value))):
            return True
        opening = yield from form.opening(r, self.call.params)
        return bool(opening and opening.key == self.opening.key)

    def text(self, emit: Emit) -> Steps[None]:
        """Emit the text of the value and consume its end marker. Raises `Malformed`."""
        r, stop = self.call.ctx.r, self._stop()
        self.text_start = r.position
        if self.form.value and (yield from r.ahead(r.expect(markers(self.form.value)), REPEAT_LIMIT)):
            self.has_start_again, self.open_parameters = True, 1
        while hit := (yield from r.until(stop, emit, keep=True)):
            meaning, size = (yield from r.ahead(self._meaning(hit), LOOKAHEAD_LIMIT)) or (_Meaning.TEXT, len(hit))
            match meaning:
                case _Meaning.END | _Meaning.END_IS_MISSING:
                    is_repaired = meaning is _Meaning.END_IS_MISSING
                    if self.depth and (self.has_quoted_end or self.has_quoted_parameter):
                        break  # it is not known what the value has quoted
                    if self.has_start_again and self.open_parameters:
                        break  # the value has one end for two starts
                    if self.has_text_end and (self.depth or is_repaired):
                        break  # the text after the last end marker may be no part of the value
                    self.call.is_repaired |= is_repaired
                    r.take(size)
                    return
                case _Meaning.OPENS:
                    self.depth += 1
                case _Meaning.CLOSES:
                    self.depth -= 1
                    self.has_quoted_end = True
                case _Meaning.TEXT:
                    self._note_text(hit.lstrip("\r\n"))
            emit(r.take(size))
        raise Malformed

    def _note_text(self, word: str) -> None:
        """Record a marker that is a part of the value."""
        if self.depth:
            return
        if word in spellings(self.form.param):
            self.open_parameters += 1
        elif word in self._ends():
            self.open_parameters = max(0, self.open_parameters - 1)
        self.has_text_end |= word in self._ends() or word in end_words(self.call.ctx.r, self.form.ends)

    def _stop(self) -> MarkerSet:
        form = self.form
        if self.is_cdata:
            return markers(_CDATA_END)
        own, outer = self._ends(), end_words(self.call.ctx.r, form.ends)
        on_lines = [form.param, *outer, *(own if form.strip_line else ())]
        lines = [line_break + word for word in on_lines for line_break in _LINE_BREAKS]
        return markers(*spellings(form.param), *form.openers, *outer, *own, *lines)

    def _ends(self) -> dict[str, str]:
        return end_words(self.call.ctx.r, self.opening.ends)

    def _meaning(self, hit: str) -> Steps[tuple[_Meaning, int]]:
        """Return the meaning of the marker that comes next, and the number of characters that share it."""
        r, start = self.call.ctx.r, self.call.ctx.r.position
        word = hit.lstrip("\r\n")
        break_size = len(hit) - len(word)
        if word in self._ends() or self.is_cdata:
            r.take(len(hit) if self.is_cdata else break_size)
            yield from r.space() if self.is_cdata else ()
            marker = yield from self._end()
            if not marker:
                raise Malformed
            # A marker without its namespace counts only beside one that has it, or if the parameter begins like that.
            meaning, end = yield from self._after_end(marker == self.form.param_end or not self.opening.is_own)
            return meaning, end - start
        if word in self.form.openers:
            meaning, end = yield from self._quoted_start()
            return meaning, end - start
        r.take(break_size)
        if word == self.form.param:
            is_end = yield from self._is_next_parameter(bool(break_size), is_first=start == self.text_start)
            return (_Meaning.END_IS_MISSING, break_size) if is_end else (_Meaning.TEXT, len(hit))
        if word in spellings(self.form.param):
            return _Meaning.TEXT, len(hit)
        is_end = yield from self._is_call_end()
        return (_Meaning.END_IS_MISSING, break_size) if is_end else (_Meaning.TEXT, len(hit))

    def _is_next_parameter(self, at_line_start: bool, is_first: bool) -> Steps[bool]:
        """Return whether another parameter begins here, so that the end marker of this one is missing."""
        opening = yield from self.form.opening(self.call.ctx.r, self.call.params)
        self.has_start_again |= is_first and opening is not None and opening.key == self.opening.key
        if not opening or not opening.is_whole or opening.key in self.call.given or self.depth:
            return False
        if not self.call.params.names:
            return self.form.strip_line and at_line_start
        if opening.key not in self.call.params.names:
            return False
        # A model that writes values on lines of their own writes their markers there, too.
        is_next = at_line_start or not self.is_line
        if not is_next:
            self.call.quoted.add(opening.key)
        return is_next

    def _end(self) -> Steps[str]:
        """Read an end marker of the value, in any spelling."""
        return (yield from end_tag(self.call.ctx.r, self.opening.ends, self.opening.key))

    def _after_end(self, is_own: bool) -> Steps[tuple[_Meaning, int]]:
        """Return the meaning of an end marker by what follows it, and where the text ends that shares the meaning."""
        r, end = self.call.ctx.r, self.call.ctx.r.position
        last = end
        char = yield from r.space()
        # A marker that is written again directly behind it is no text, unless it ends a parameter in the value.
        while not (self.depth or self.open_parameters) and (yield from self._end()):
            last = r.position
            char = yield from r.space()
        if not char:
            return _Meaning.END, last
        meaning, text_end = yield from self._continuation(end, is_own)
        return meaning, (last if meaning is _Meaning.END else text_end)

    def _continuation(self, end: int, is_own: bool) -> Steps[tuple[_Meaning, int]]:
        """Return the meaning of an end marker that ends at `end` by the text after it, and where its text ends."""
        r, form = self.call.ctx.r, self.form
        opening = yield from form.opening(r, self.call.params)
        if opening:
            is_declared = opening.key in self.call.params.names
            if self.depth:
                self.has_quoted_parameter |= opening.is_whole and is_declared and opening.key not in self.call.given
                return _Meaning.TEXT, end
            is_quoted = self.open_parameters > 0 or not (is_own or opening.is_own)
            if (is_quoted and opening.key in self.call.given) or not (opening.is_whole or is_declared):
                return _Meaning.TEXT, end
            return _Meaning.END, end
        if not (call_end := (yield from self._call_end())):
            return _Meaning.TEXT, end
        if not (yield from r.space()):
            return _Meaning.END, end
        if not (is_own or call_end.is_own):
            return _Meaning.TEXT, end
        if self.depth:
            return _Meaning.CLOSES, call_end.position
        return (_Meaning.TEXT if (yield from self._is_ended_again(call_end.is_wrap_closed)) else _Meaning.END), end

    def _call_end(self) -> Steps["_CallEnd | None"]:
        """Read the end of a call, and of its wrapper if that follows; None if there is no end here."""
        r, form = self.call.ctx.r, self.form
        if not (hit := (yield from form.call_end_or_cut(r))):
            return None
        end, is_own = r.position, hit in form.ends
        if hit not in all_spellings(form.call_end):
            return _CallEnd(end, is_own, is_wrap_closed=True)
        yield from r.space()
        if (yield from cut_end(r, form.wrap_end, ())):
            return _CallEnd(r.position, is_own, is_wrap_closed=True)
        wrap_ends = [end for end in form.inner_ends if end not in all_spellings(form.call_end)]
        if wrap_end := (yield from end_tag(r, wrap_ends)):
            return _CallEnd(r.position, is_own or wrap_end in form.ends, is_wrap_closed=True)
        return _CallEnd(end, is_own, is_wrap_closed=False)

    def _is_ended_again(self, is_closed: bool) -> Steps[bool]:
        """Return whether the text after a call holds another end of a value, so that this one goes on until there."""
        r, form, start = self.call.ctx.r, self.form, self.call.ctx.r.position
        wrap_end = form.wrap_end if self.call.is_wrapped and not is_closed else ()
        words = markers(*self.opening.ends, form.call_end, *form.openers, *wrap_end)
        # Ends that are only written again, with nothing between them, end no other value.
        yield from ends_again(r, (*self.opening.ends, *form.inner_ends))
        while (left := _TEXT_LIMIT - (r.position - start)) > 0:
            hit = yield from r.until(words, drop, left, keep=True)
            if not hit or hit in wrap_end:
                return False
            if hit not in form.openers:
                return True
            if (yield from r.ahead(form.begins(self.call.ctx), LOOKAHEAD_LIMIT)):
                return False
            r.take(len(hit))
        return False

    def _quoted_start(self) -> Steps[tuple[_Meaning, int]]:
        """Return whether a call with parameters begins here, and where the text ends that is certainly quoted."""
        r, form = self.call.ctx.r, self.form
        hit = yield from r.literal(markers(*form.openers))
        end = r.position
        if hit not in form.wrap or not form.call:
            head, _ = yield from r.capture(markers(form.param, *form.ends, *self.opening.ends), NAME_LIMIT, True)
            head = head.rstrip()
            head_end = next((marker for marker in form.head_end if head.endswith(marker)), "")
            name = _HEAD_TAG.sub("", head) if form.value else head.removesuffix(head_end)
            if not (form.value or head_end) or not _QUOTED_HEAD.fullmatch(name):
                return _Meaning.TEXT, end
            if (yield from form.opening(r, Parameters({}))):
                return _Meaning.OPENS, end
            if call_end := (yield from self._call_end()):
                return _Meaning.TEXT, call_end.position
        return _Meaning.TEXT, end

    def _is_call_end(self) -> Steps[bool]:
        """Return whether the call ends here, so that the end marker of the value is missing: then nothing but a call
        of a declared tool may follow.
        """
        ctx = self.call.ctx
        call_end = yield from self._call_end()
        if self.depth or not call_end:
            return False
        if not (yield from ctx.r.space()):
            return not ctx.r.is_cut
        is_whole = call_end.is_wrap_closed or not self.form.wrap_end or not self.call.is_wrapped
        return is_whole and (yield from self.form.begins(ctx, is_declared=True))
