"""Grammars of values that are plain text between tags and may quote the markup of their own family.

A value may hold what `worker.output.parsers.xml_notation` reads as its text: markers on their own, and whole calls. It
may not hold what the parser may read as its end, or as a further parameter or call.

An automaton reads the text as segments, each from one `<` up to the next: whether a marker is text depends on its
segment and on the markers just before it.

Regular expressions of text as a sequence of segments, each of which begins with `<` and holds no other one.

They need no complement of an expression: llguidance explores complements when it compiles a grammar, which takes too
long where several are combined.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import repeat
from typing import Final

from worker.output.parsers.xml_calls import XmlCalls
from worker.output.parsers.xml_notation import (
    CDATA,
    all_spellings,
    end_beginnings,
    end_tags,
    spaced,
    spellings,
    with_line_breaks,
)
from worker.structured.tool_grammar.lark import BLANK, Lark, escape

REST: Final = "[^<]*"
# Characters that are no part of a key in a tag.
_NO_KEY: Final = r"<>\s\x1c-\x1f\x22'=\/"


def beginning(words: Iterable[str], rest: str = REST) -> str:
    """Return the regex of text that begins with one of the `words`; "" if there are none."""
    options = "|".join(sorted(set(map(escape, words))))
    return f"({options}){rest}" if options else ""


def not_beginning(words: Collection[str]) -> str:
    """Return the regex of the rest of a segment that begins with none of the `words`."""
    return _other(words, "<", REST, is_whole=False)


def other_key(keys: Collection[str]) -> str:
    """Return the regex of a key that is none of the `keys`, and not empty."""
    return _other({*keys, ""}, _NO_KEY, f"[^{_NO_KEY}]*", is_whole=True)


def _other(words: Collection[str], excluded: str, rest: str, *, is_whole: bool) -> str:
    """Return the regex of text without the `excluded` characters that begins with none of the `words`, or with
    `is_whole` is none of them.
    """
    firsts = sorted({word[0] for word in words if word})
    options = [f"[^{excluded}{''.join(map(escape, firsts))}]{rest}"]
    for first in firsts:
        further = [word[1:] for word in words if word.startswith(first)]
        if is_whole or "" not in further:
            options.append(escape(first) + _other(further, excluded, rest, is_whole=is_whole))
    return f"({'|'.join(options)})" + ("" if "" in words else "?")


def joined(edges: Mapping[tuple[str, str], str], start: str, final: str, name: Callable[[str], str]) -> str:
    """Return the expression of all paths from `start` to `final` in an automaton, whose edges have expressions.

    `name` defines an expression and returns its name, so that each is written once.
    """
    left = dict(edges)
    inner = {state for edge in left for state in edge} - {start, final}
    for state in sorted(inner):
        loop = name(f"({left.pop((state, state))})*") if (state, state) in left else ""
        into = {edge[0]: left.pop(edge) for edge in list(left) if edge[1] == state}
        out = {edge[1]: left.pop(edge) for edge in list(left) if edge[0] == state}
        after = {target: name(f"{loop} {name(rest)}") for target, rest in out.items()}
        for source, before in into.items():
            for target, rest in after.items():
                known = left.get((source, target))
                path = f"{name(before)} {rest}"
                left[source, target] = f"{known} | {path}" if known else path
    return left.get((start, final), "")


ANY_TEXT: Final = r"(?s:.*)"
# Subset of the names, keys and attributes that the parser reads. Its limits on their length are higher.
_NAME: Final = r"[a-zA-Z0-9_.\-]{1,40}"
_ATTRIBUTE: Final = rf" [a-z]{{1,16}}=\x22{_NAME}\x22"
_KEY_ATTRIBUTE: Final = rf" (name|key)=\x22{_NAME}\x22({_ATTRIBUTE})?"
_PLAIN_KEY: Final = re.compile(r"[\w.\-:@$]+")
# Maximum number of blanks between the end of a value and the end of its call, in a quoted call.
_MAX_BLANKS: Final = 16
_NOT_BLANK: Final = r"[^\s\x1c-\x1f<]"
# Characters beside a key in its tag, and the rest of a tag that has no end, which is no start of a parameter.
_SIDE: Final = r"[\s\x1c-\x1f\x22'\/]"
_UNENDED: Final = rf"{BLANK}*[^\s\x1c-\x1f<>][^<>]*"
# Rest of the start of a call without arguments as JSON, and of a tag that does not close itself.
_NO_BODY: Final = r"[^<\{\[\/]*"
# States of the automata, named for what the text so far ends with. A head is the start of a call up to its first
# parameter; in some families it holds a tag.
_START: Final = "start"
_FIRST: Final = "blanks at the start"
_TEXT: Final = "text"
_QUOTED: Final = "quoted call"
_OWN_HEAD: Final = "head as the family writes it"
_HEAD: Final = "head"
_HEAD_TAG: Final = "tag in a head"
_CALL_END: Final = "end of a call"
_NEXT_WRAP: Final = "wrapper after the end of a call"
_NEXT_HEAD: Final = "head after the end of a call"
_VALUE_END: Final = "end of a value"
_PARAM: Final = "start of a parameter without its key"
_FINAL: Final = "final"


class PlainText:
    """Writer of the plain values of one family. `end` is the text after a value, up to the next tag; `keys` are those
    of all parameters of all tools.
    """

    def __init__(self, lark: Lark, form: XmlCalls, end: str, keys: Collection[str]) -> None:
        self._lark = lark
        self._form = form
        self._end = end
        self._keys = sorted(keys)
        own = (form.param, form.call_end, form.param_end)
        # If the tags after a value begin with control tokens, no character shows that an end is one.
        next_tags = (form.param, form.param_end, _first_tag(form.call_end))
        self._has_tags = all(map(lark.marks.is_plain, next_tags))
        self._calls = (form.call,) if form.call else form.wrap
        markers = (*self._calls, *form.wrap, *form.wrap_end, *form.head_end, form.key_end, form.value, *own)
        self._is_segmented = all("<" not in marker[1:] for marker in markers if lark.marks.is_plain(marker))
        # The parser reads a marker as text if it has a control token that the model spelled with ordinary ones. Whether
        # a value quotes a call would depend on that.
        used = (*self._calls, *form.head_end, form.key_end, form.value, *own)
        self._may_quote = self._is_segmented and self._has_tags and not any(map(lark.marks.has_token, used))
        ends = [end_tags(text).stem for text in form.inner_ends]
        self._words = {
            "value end": self._plain(spellings(form.param_end) if self._has_tags else ()),
            "no text": self._plain(() if self._has_tags else spellings(form.param_end)),
            "other value end": self._plain(end_beginnings(form.param_end)),
            "call end": self._plain(ends),
            "call": self._plain(with_line_breaks(form.call) if form.call else form.wrap),
            "other call": self._plain(form.inner_starts[1:] if form.call else ()),
            "wrap": self._plain(form.wrap if form.call else ()),
            "param": self._plain([form.param]),
            "other param": self._plain([*spellings(form.param)[1:], *spaced(form.param)]),
            "value": self._plain([form.value]),
            "key end": self._plain([form.key_end] if form.key_end.startswith("<") else ()),
            "cdata": self._plain([CDATA] if form.cdata else ()),
        }
        of_wrap = [end_tags(text).stem for text in form.inner_ends if text not in all_spellings(form.call_end)]
        # Ends of a call with which no end of a wrapper begins.
        self._inner_ends = [
            end for end in self._words["call end"] if not any(map(str.startswith, of_wrap, repeat(end)))
        ]
        # An end in another spelling is text if it has no `>`, or if other text than a tag follows.
        self._after_other_end = f"[^<>]*(>{BLANK}*{_NOT_BLANK}{REST})?" if self._has_tags else "[^<>]*"
        self._has_head_tag = bool(form.value) or form.head_end[0].startswith("<")
        every = [word.removeprefix("<") for words in self._words.values() for word in words]
        self._other = "<" + not_beginning(every)
        self._quoted = self._quoted_call() if self._may_quote else ""
        # Expressions of values by their regex and by whether they are the last.
        self._values: dict[tuple[str, bool], str] = {}

    @property
    def value_ends(self) -> tuple[str, ...]:
        """Texts that end a value, first the last one of a call together with the call, which may be a quoted one."""
        quoted = (self._end + self._form.call_end,) if self._may_quote else ()
        return (*quoted, *((self._end + "<",) if self._has_tags else ()), self._end)

    @property
    def key_ends(self) -> tuple[str, ...]:
        """Texts that end the key of a parameter of a quoted call."""
        if not self._may_quote:
            return ()
        end = self._form.key_end if _is_text(self._form.param) else '"'
        return (end, "x" + end)

    def value(self, body: str, *, is_last: bool) -> str:
        """Return the expression of a value that matches the regex `body`, and of the end after it.

        `is_last` means that the call certainly has all other parameters already.
        """
        if not self._is_segmented:
            return self._value_without_starts(body, is_last=is_last)
        key = (body, is_last)
        if key not in self._values:
            self._values[key] = self._quoting_value(body, is_last=is_last)
        return self._values[key]

    def _quoting_value(self, body: str, *, is_last: bool) -> str:
        """Return the expression of a value that may hold markup of its family.

        A value that must match a regex quotes no calls, because it is one lexeme.
        """
        lark, end = self._lark, escape(self._end)
        first = self._edges(is_first=True, is_last=is_last)
        if not lark.marks.is_plain(self._end):
            return lark.before(self._end, f"/{body}/ & {lark.terminal(self._path(first, ''))}")
        whole = lark.terminal(self._path(first, end))
        if body != ANY_TEXT:
            return lark.terminal(f"/({body}){end}/ & {whole}")
        if not self._quoted:
            return whole
        later = self._edges(is_first=False, is_last=is_last)
        opening = lark.terminal(self._path(first, escape(self._form.param), (_OWN_HEAD,)))
        final = lark.terminal(self._path(later, end))
        further = lark.terminal(self._path(later, escape(self._form.param), (_OWN_HEAD,)))
        rest = lark.reserve()
        lark.define(rest, f"{final} | {further} {self._quoted} {rest}")
        return lark.rule(f"{whole} | {opening} {self._quoted} {rest}")

    def _value_without_starts(self, body: str, *, is_last: bool) -> str:
        """Return the expression of a value without any start of a call or of a parameter that the call may not have."""
        form = self._form
        further = () if is_last else (form.param,)
        cdata = (CDATA,) if form.cdata else ()
        ends, others = spellings(form.param_end), (*end_beginnings(form.param_end), *form.openers, *further)
        first = (form.param, form.value, *cdata)
        if not self._has_tags:
            return self._lark.until(self._end, (*ends, *others), body=body, first=first)
        before_tag = f"{beginning(self._plain(ends), BLANK + '*')}<"
        text, starts = beginning(self._plain(others), ANY_TEXT), beginning(self._plain(first), ANY_TEXT)
        banned = f"{ANY_TEXT}({before_tag}{ANY_TEXT}|{text})|{BLANK}*{starts}"
        return self._lark.terminal(f"/({body}){escape(self._end)}/ & ~/{banned}/")

    def _path(self, edges: "_Edges", final: str, states: Sequence[str] = ()) -> str:
        """Return the expression of a text up to `final`, which may follow in these states, or in any."""
        paths = {edge: " | ".join(map(self._named, regexes)) for edge, regexes in edges.known.items()}
        followed = {state for edge in paths for state in edge} - {_START}
        for state in sorted(followed.intersection(states) if states else followed - {_OWN_HEAD}):
            paths[state, _FINAL] = self._named(final)
        return joined(paths, _START, _FINAL, self._lark.terminal)

    def _edges(self, *, is_first: bool, is_last: bool) -> "_Edges":
        """Return the automaton of a value. With `is_first` it begins with this text, otherwise with a quoted call."""
        form, words = self._form, self._words
        edges = _Edges()
        edges.add(_START, _FIRST if is_first else _QUOTED, f"{BLANK}*")
        edges.add(_START, _TEXT, f"{BLANK}*{_NOT_BLANK}{REST}")
        # A parameter of the call may begin in no value, nor the value's own at its start.
        for state in (_FIRST, _TEXT, _QUOTED, _CALL_END, _NEXT_WRAP):
            self._add_params(edges, state, () if is_last and state != _FIRST else self._keys)
        for state in (_FIRST, _TEXT, _QUOTED, _PARAM, _HEAD, _HEAD_TAG, _CALL_END, _NEXT_WRAP, _NEXT_HEAD):
            if state == _NEXT_HEAD and self._has_head_tag:
                continue
            then = _HEAD_TAG if state == _HEAD and self._has_head_tag else _TEXT
            edges.add(state, then, self._other, beginning(words["value end"], f"{BLANK}*{_NOT_BLANK}{REST}"))
            edges.add(state, then, beginning(words["other value end"], self._after_other_end))
            if state != _FIRST:
                edges.add(state, then, beginning([*words["value"], *words["cdata"]]))
            edges.add(state, then, beginning(words["key end"]))
            if state != _CALL_END:
                edges.add(state, then, beginning(words["wrap"]))
            if state != _NEXT_HEAD:
                edges.add(state, then, beginning(words["other param"] if state != _PARAM else ()))
                self._add_call_end(edges, state)
            if state in (_NEXT_WRAP, _NEXT_HEAD):
                edges.add(state, _NEXT_HEAD, beginning([*words["call"], *words["other call"]], _NO_BODY))
            elif state == _CALL_END:
                edges.add(state, _NEXT_HEAD, beginning(words["call"], _NO_BODY))
                edges.add(state, _TEXT, beginning(words["other call"]))
            else:
                edges.add(state, then, beginning(words["other call"]))
                edges.add(state, _HEAD, beginning(words["call"]))
                if self._may_quote:
                    edges.add(state, _OWN_HEAD, self._call_start())
        end = escape(_first_tag(form.call_end))
        edges.add(_OWN_HEAD, _QUOTED, f"{end}{BLANK}*")
        edges.add(_OWN_HEAD, _TEXT, f"{end}{BLANK}*{_NOT_BLANK}{REST}")
        edges.add(_CALL_END, _NEXT_WRAP, beginning(words["wrap"], f"{BLANK}*"))
        no_json = r"[^\s\x1c-\x1f<\{\[]" if form.json else _NOT_BLANK
        edges.add(_CALL_END, _TEXT, beginning(words["wrap"], f"{BLANK}*{no_json}{REST}"))
        return edges

    def _add_call_end(self, edges: "_Edges", state: str) -> None:
        """Add the edges of the end of a call, which is text unless the start of another call follows."""
        ends = self._words["call end"]
        if state == _QUOTED:
            # The end of the wrapper belongs to the quoted call. The parser reads no half of it there.
            edges.add(state, _TEXT, beginning(self._form.wrap_end))
            ends = self._inner_ends
        edges.add(state, _CALL_END, beginning(ends, f"[^<>]*>{BLANK}*"))
        edges.add(state, _TEXT, beginning(ends, f"[^<>]*(>{BLANK}*{_NOT_BLANK}{REST})?"))

    def _quoted_call(self) -> str:
        """Return the rule of a quoted call after the start of its first parameter. It may quote another call."""
        lark, form = self._lark, self._form
        final = escape(_first_tag(form.call_end))
        first, later = self._quoted_edges(is_first=True), self._quoted_edges(is_first=False)
        closing, further_closing = (lark.terminal(self._path(edges, final, (_VALUE_END,))) for edges in (first, later))
        nested, further_nested = (
            lark.terminal(self._path(edges, escape(form.param), (_OWN_HEAD,))) for edges in (first, later)
        )
        key = self._named((_NAME if _is_text(form.param) else _KEY_ATTRIBUTE) + escape(form.key_end))
        rest = lark.reserve()
        lark.define(rest, f"{further_closing} | {further_nested} {key} {closing} {rest}")
        return lark.rule(f"{key} ({closing} | {nested} {key} {closing} {rest})")

    def _quoted_edges(self, *, is_first: bool) -> "_Edges":
        """Return the automaton of the text in a quoted call. Without `is_first`, another quoted call is before it."""
        form, words = self._form, self._words
        own_end = [form.param_end]
        edges = _Edges()
        edges.add(_START, _TEXT if is_first else _QUOTED, f"{BLANK}*")
        edges.add(_START, _TEXT, f"{BLANK}*{_NOT_BLANK}{REST}")
        for state in (_TEXT, _QUOTED, _HEAD, _HEAD_TAG, _VALUE_END):
            then = _HEAD_TAG if state == _HEAD and self._has_head_tag else _TEXT
            edges.add(state, then, self._other, beginning(own_end, f"{BLANK}*{_NOT_BLANK}{REST}"))
            for kind in ("value", "cdata", "key end", "wrap", "other param", "other call"):
                edges.add(state, then, beginning(words[kind]))
            edges.add(state, then, beginning(words["other value end"], "[^<>]*"))
            edges.add(state, _VALUE_END, beginning(own_end, f"{BLANK}{{0,{_MAX_BLANKS}}}"))
            edges.add(state, _HEAD, beginning(words["call"]))
            edges.add(state, _OWN_HEAD, self._call_start())
            if state in (_TEXT, _QUOTED, _VALUE_END):
                edges.add(state, _TEXT, beginning(words["param"]))
            if state == _QUOTED:
                edges.add(state, _TEXT, beginning(form.wrap_end))
                edges.add(state, _TEXT, beginning(self._inner_ends))
            elif state != _VALUE_END:
                edges.add(state, _TEXT, beginning(words["call end"]))
        return edges

    def _call_start(self) -> str:
        """Return the regex of the start of a call up to its first parameter, as the family writes it."""
        form = self._form
        name = _NAME if not form.call or _is_text(form.call) else f"({_ATTRIBUTE}){{1,2}}"
        head_end = escape(form.head_end[0]) if form.call else ""
        return beginning(self._calls, rf"{name}{head_end}{BLANK}{{0,4}}")

    def _add_params(self, edges: "_Edges", state: str, keys: Sequence[str]) -> None:
        """Add the edges of segments that begin like a parameter, but none with one of these keys."""
        form, starts = self._form, self._words["param"]
        if not keys:
            edges.add(state, _TEXT, beginning(starts))
        if not keys or not all(map(_PLAIN_KEY.fullmatch, keys)):
            return
        # The parser reads a start that is written twice as one.
        edges.add(state, _PARAM, beginning(starts, f"{BLANK}*"))
        other = other_key(keys)
        head, tail = r"( (name|key)=\x22)?", r"\x22 (string|type)=\x22[a-z]*\x22"
        if form.key_end == ">":
            labels = [_UNENDED, f"({head}{other}({_SIDE}[^<>=]*|{tail})?)?>{REST}"]
        else:
            labels = [f"{_SIDE}*({head}{other}({_SIDE}[^<=]*)?)?"]
        edges.add(state, _TEXT, *(beginning(starts, label) for label in labels))

    def _named(self, regex: str) -> str:
        return self._lark.terminal(f"/{regex}/")

    def _plain(self, words: Iterable[str]) -> list[str]:
        """Return those of these words that ordinary tokens can spell, without those that begin with another one."""
        known = sorted({word for word in words if word and self._lark.marks.is_plain(word)})
        return [word for word in known if not any(word != other and word.startswith(other) for other in known)]


class _Edges:
    """Edges of an automaton under construction: regexes by the states before and after them."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, str], list[str]] = {}

    def add(self, before: str, after: str, *regexes: str) -> None:
        """Add the edges of those of these regexes that are not empty."""
        for regex in filter(None, regexes):
            self.known.setdefault((before, after), []).append(regex)


def _is_text(marker: str) -> bool:
    """Return whether a name or key is the text of the tag that `marker` begins, not an attribute."""
    return marker.endswith(("=", ">"))


def _first_tag(marker: str) -> str:
    tags = end_tags(marker)
    return tags.stem + tags.closing
