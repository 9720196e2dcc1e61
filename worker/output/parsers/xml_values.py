"""Values between tags: which markers in the text of a value end it, and which are a part of it.

A marker ends a value only if the call can continue after it: with a parameter, with the end of the call, or with the
end of the output.
"""

import re
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, NamedTuple

from worker.output.parsers.call import LOOKAHEAD_LIMIT, NAME_LIMIT, ParserContext, drop
from worker.output.parsers.reader import REPEAT_LIMIT, Emit, Malformed, MarkerSet, Steps, markers
from worker.output.parsers.schema import Parameters, Types
from worker.output.parsers.xml_notation import (
    ParameterStart,
    XmlNotation,
    all_spellings,
    cut_end,
    end_tag,
    end_words,
    ends_again,
    spellings,
)

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
