"""Outputs that consist of messages with headers: gpt-oss Harmony and Muse."""

import re
from dataclasses import dataclass
from typing import Final

from worker.output.parsers.call import (
    NAME_LIMIT,
    CallFormat,
    ParserContext,
    attempt,
    begin,
    checked,
    drop,
    end,
    expect_end,
    json_arguments,
)
from worker.output.parsers.reader import Malformed, MarkerSet, MarkupReader, Steps, markers
from worker.output.parsers.xml_notation import XmlNotation

_MESSAGE: Final = "<|message|>"
_NON_TOOL_RECIPIENTS: Final = frozenset({"assistant", "user", "all", "self"})
_START: Final = "<|start|>"
_CHANNEL: Final = "<|channel|>"
_MESSAGES: Final = markers(_MESSAGE)
_TO: Final = markers("to=", "to =")
_TOOL: Final = "functions."
_QUOTES: Final = markers('"', "'")
_WORD: Final = re.compile(r"[\w.\-:/@$]+")
# A channel may be written together with a capital letter that follows it.
_CHANNELS: Final = ("analysis", "commentary", "final")
_KNOWN_CHANNEL: Final = re.compile(rf"(?:{'|'.join(_CHANNELS)})(?![a-z0-9_])")
_TYPES: Final = ("json", "code", "text")
_ROLES: Final = ("assistant", "user", "system", "developer", "tool")
_WORDS: Final = markers("assistant", *_CHANNELS, *_TYPES)
_KNOWN: Final = {_START: _ROLES, _CHANNEL: _CHANNELS}


@dataclass(frozen=True, slots=True)
class Channels:
    """Markup of messages. The markers of `header` are parts of a header, a marker of `ends` ends a message; `body` is
    the format of calls, JSON if it is None.
    """

    header: tuple[str, ...]
    ends: tuple[str, ...]
    body: CallFormat | None = None
    reasoning_end: str = ""


HARMONY: Final = Channels(
    ("<|start|>", "<|channel|>", "<|constrain|>", _MESSAGE),
    ("<|end|>", "<|call|>", "<|return|>"),
    reasoning_end="<|end|><|start|>assistant<|channel|>final<|message|>",
)


@dataclass(slots=True)
class _Header:
    """Header of one message. Of several channels and recipients, the last ones count."""

    channel: str = ""
    recipient: str = ""
    dropped: int = 0  # how many recipients are tools, and are followed by another recipient

    @property
    def is_for_tool(self) -> bool:
        return self.recipient not in ("", *_NON_TOOL_RECIPIENTS)

    @property
    def is_reasoning(self) -> bool:
        return self.recipient == "self" or (not self.is_for_tool and self.channel == "analysis")


@dataclass(frozen=True, slots=True)
class _Item:
    """Part of a header: its length with the whitespace before it, and what it says."""

    size: int
    marker: str = ""
    channel: str = ""
    recipient: str = ""


class _HeaderReader:
    """Reader of headers, whose markers are `tokens`. A header ends with `<|message|>`, or where its next word cannot be
    a part of it: models leave the marker out, and the message then begins with that word.
    """

    def __init__(self, r: MarkupReader, tokens: MarkerSet, ends: MarkerSet) -> None:
        self._r = r
        self._tokens = tokens
        self._ends = ends
        self._next = markers(*(token for token in tokens.words if token != _START))

    def opening(self) -> Steps[_Header | None]:
        """Read a header whose first marker is missing, such as ` to=functions.f<|channel|>commentary<|message|>`.

        Returns None, and consumes nothing, if there is none.
        """
        recipient = yield from self._r.ahead(self._opening(), NAME_LIMIT)
        if recipient is None:
            return None
        return (yield from self.read(_START, _Header()))

    def read(self, marker: str, header: _Header) -> Steps[_Header]:
        """Read the header that begins with `marker`, which is consumed."""
        r = self._r
        while marker != _MESSAGE:
            item = yield from r.ahead(self._item(marker, header), NAME_LIMIT)
            if item is None:
                yield from r.space()
                return header
            r.take(item.size)
            marker = item.marker
            header.channel = item.channel or header.channel
            if item.recipient:
                header.dropped += header.is_for_tool and header.recipient != item.recipient
                header.recipient = item.recipient
        while header.is_for_tool and (yield from r.literal(_MESSAGES)):
            pass
        return header

    def _opening(self) -> Steps[str]:
        """Look for a role, channel or recipient before a marker. Raises `Malformed`."""
        r = self._r
        recipient, is_open = "", False
        while True:
            char = yield from r.space()
            named = (yield from self._recipient()) if char == "t" else ""
            if not named and not (yield from r.literal(_WORDS)):
                break
            recipient, is_open = named or recipient, True
        if not is_open:
            raise Malformed
        if not (yield from r.literal(self._next)) and not (char == "{" and recipient.startswith(_TOOL)):
            raise Malformed
        return recipient

    def _item(self, after: str, header: _Header) -> Steps[_Item]:
        """Look for the next part of a header, after the marker `after`. Raises `Malformed` if it is over."""
        r, start = self._r, self._r.position
        char = yield from r.space()
        if marker := (yield from r.literal(self._next)):
            return _Item(r.position - start, marker)
        if char == "t" and (recipient := (yield from self._recipient())):
            return _Item(r.position - start, recipient=recipient)
        begin = r.position
        word = yield from self._word()
        if after == _CHANNEL and (known := _KNOWN_CHANNEL.match(word)):
            return _Item(begin - start + known.end(), channel=known[0])
        size = r.position - start
        if not (yield from self._is_part(word, after, header)):
            raise Malformed
        if word.startswith(_TOOL) and after != _START:
            return _Item(size, recipient=word)
        return _Item(size, channel=word if after == _CHANNEL or word in _CHANNELS else "")

    def _is_part(self, word: str, after: str, header: _Header) -> Steps[bool]:
        """Return whether a word is a part of the header: a known one, or one with a further part behind it."""
        r, known = self._r, _KNOWN.get(after, _TYPES)
        char = yield from r.space()
        if not char:
            return bool(after) and (word in known or (r.is_cut and any(each.startswith(word) for each in known)))
        if (yield from r.literal(self._ends)):
            return bool(after) and word in known
        is_before_part = bool((yield from r.literal(self._next)))
        if is_before_part or (char == "t" and bool((yield from self._recipient()))):
            return bool(after) or header.is_for_tool or word in (*known, *_CHANNELS) or word.startswith(_TOOL)
        if char == "{":
            return word.startswith(_TOOL) or (word in known and (bool(after) or header.is_for_tool))
        return word in known and after == _START

    def _recipient(self) -> Steps[str]:
        """Read `to=NAME`; return "" if it is not there."""
        r = self._r
        if not (yield from r.literal(_TO)):
            return ""
        yield from r.space()
        quote = yield from r.literal(_QUOTES)
        word = yield from self._word()
        if quote:
            yield from r.literal(markers(quote))
        return word

    def _word(self) -> Steps[str]:
        """Read a word. Raises `Malformed` if there is none, or if it is longer than any name."""
        r = self._r
        while True:
            match = _WORD.match(r.buf, r.at)
            end = match.end() if match else r.at
            if end - r.at > NAME_LIMIT:
                raise Malformed
            if end < len(r.buf) or r.ended:
                break
            yield
        if not match:
            raise Malformed
        return r.take(end - r.at)


class ChannelMessages:
    """Parser of one output."""

    def __init__(self, ctx: ParserContext, channels: Channels, parse_tools: bool) -> None:
        self._ctx = ctx
        self._channels = channels
        self._parse_tools = parse_tools
        self._stop = markers(*channels.ends, *channels.header)
        body = channels.body.starts if channels.body and parse_tools else ()
        self._value_end = channels.body.param_end if isinstance(channels.body, XmlNotation) and parse_tools else ""
        self._text = markers(*channels.ends, *channels.header, *body, self._value_end)
        self._tokens = markers(*channels.header)
        self._headers = _HeaderReader(ctx.r, self._tokens, markers(*channels.ends))

    def read(self, in_reasoning: bool) -> Steps[None]:
        """Parse the whole output. `in_reasoning` means that the prompt has opened an analysis message."""
        r = self._ctx.r
        hit, header = "", _Header("analysis" if in_reasoning else "")
        if in_reasoning:
            hit = yield from self._body(header)
        while True:
            # A second `<|message|>` continues the message.
            if hit != _MESSAGE:
                header = yield from self._header(hit)
                self._ctx.out.malformed += header.dropped if self._parse_tools else 0
            hit = yield from self._body(header)
            if not hit and r.ended and r.at >= len(r.buf):
                return

    def _header(self, hit: str) -> Steps[_Header]:
        """Read the header that begins with the marker `hit`, or follows the end of a message."""
        if not hit or hit in self._channels.ends:
            if opened := (yield from self._headers.opening()):
                return opened
            hit = yield from self._ctx.r.literal(self._tokens)
        return (yield from self._headers.read(hit, _Header())) if hit else _Header()

    def _body(self, header: _Header) -> Steps[str]:
        """Parse one message up to and including the marker that ends it, and return the marker."""
        r, out = self._ctx.r, self._ctx.out
        if header.is_reasoning:
            out.open_reasoning()
            hit = _MESSAGE
            while hit == _MESSAGE:
                hit = yield from r.until(self._stop, out.reasoning)
            out.end_reasoning()
            return hit
        if header.is_for_tool and self._parse_tools and not self._channels.body:
            return (yield from self._call(header.recipient))
        # Messages to the user may quote calls, so only messages to other recipients are searched for calls.
        stop = self._stop if header.recipient in _NON_TOOL_RECIPIENTS else self._text
        while True:
            hit = yield from r.until(stop, out.text)
            body = self._channels.body
            if hit and hit == self._value_end:
                out.text(hit)
                if out.calls:
                    out.mark_incomplete()  # a value of the last call was cut at this marker
                continue
            if not body or hit not in body.starts:
                return hit
            yield from attempt(self._ctx, body, hit, out.text)

    def _call(self, recipient: str) -> Steps[str]:
        """Parse a message to a tool up to and including the marker that ends it, and return the marker."""
        r, out = self._ctx.r, self._ctx.out
        is_call = yield from attempt(self._ctx, _CallBody(recipient), "", out.text)
        out.malformed += not is_call
        hit = yield from r.until(self._stop, out.text)
        while hit == _MESSAGE:
            rest: list[str] = []
            hit = yield from r.until(self._stop, rest.append)
            out.text("".join(rest))
            if is_call and "".join(rest).strip():
                out.mark_incomplete()  # it may be a further argument
        return hit


@dataclass(frozen=True, slots=True)
class _CallBody:
    """Format of the body of a message to a tool."""

    recipient: str
    starts: tuple[str, ...] = HARMONY.header
    ends: tuple[str, ...] = HARMONY.ends

    def calls(self, ctx: ParserContext, hit: str) -> Steps[None]:
        r = ctx.r
        char = yield from r.space()
        name = checked(self.recipient.removeprefix("functions."))
        if char in ("{", '"'):
            yield from json_arguments(ctx, begin(ctx, name))
            yield from expect_end(r)
        elif (yield from r.until(markers(*self.ends), drop, 0, keep=True)) or self._is_empty(ctx, char):
            begin(ctx, name)
            ctx.out.args("{}")
        else:
            raise Malformed
        end(ctx)
        yield from ctx.r.space()

    def _is_empty(self, ctx: ParserContext, char: str) -> bool:
        """Return whether the output ends here with a call of a declared tool that has no parameters."""
        name = ctx.tools.declared(self.recipient.removeprefix("functions."))
        is_over = not char and not ctx.r.is_cut
        return is_over and name in ctx.tools and not ctx.tools.parameters(name).names
