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
from worker.output.parsers.reader import Malformed, Steps, markers
from worker.output.parsers.xml_notation import XmlNotation

_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_NON_TOOL_RECIPIENTS: Final = frozenset({"assistant", "user", "all", "self"})
_MESSAGE: Final = markers("<|message|>")


@dataclass(frozen=True, slots=True)
class Channels:
    """Markup of messages. `header` begins a header, a marker of `ends` ends a message; `body` is the format of calls,
    JSON if it is None.
    """

    header: tuple[str, ...]
    ends: tuple[str, ...]
    body: CallFormat | None = None
    reasoning_end: str = ""


HARMONY: Final = Channels(
    ("<|start|>", "<|channel|>", " to=", "to=", "<|constrain|>", "<|message|>"),
    ("<|end|>", "<|call|>", "<|return|>"),
    reasoning_end="<|end|><|start|>assistant<|channel|>final<|message|>",
)


class ChannelMessages:
    """Parser of one output."""

    def __init__(self, ctx: ParserContext, channels: Channels, parse_tools: bool) -> None:
        self._ctx = ctx
        self._channels = channels
        self._parse_tools = parse_tools
        self._header = markers(*channels.header)
        tokens = [word for word in channels.header if word.startswith("<")]
        self._stop = markers(*channels.ends, *tokens)
        body = channels.body.starts if channels.body and parse_tools else ()
        self._value_end = channels.body.param_end if isinstance(channels.body, XmlNotation) and parse_tools else ""
        self._text = markers(*channels.ends, *tokens, *body, self._value_end)

    def read(self, in_reasoning: bool) -> Steps[None]:
        """Parse the whole output. `in_reasoning` means that the prompt has opened an analysis message."""
        r, out = self._ctx.r, self._ctx.out
        hit = ""
        if in_reasoning:
            out.open_reasoning()
            hit = yield from r.until(self._stop, out.reasoning)
            out.end_reasoning()
        while True:
            if not hit or hit in self._channels.ends:
                hit = yield from r.literal(self._header)
            header = ""
            if hit and hit != "<|message|>":
                parts = [hit]
                if not (yield from r.until(_MESSAGE, parts.append, NAME_LIMIT)):
                    # No header follows. The marker's tokens are dropped as markup, unless the marker consists of words.
                    out.text(hit if hit.strip().startswith("to=") else "")
                    out.text("".join(parts[1:]) if not r.ended or hit.strip().startswith("to=") else "")
                    parts = [""]
                header = "".join(parts)
            hit = yield from self._body(header)
            if not hit and r.ended and r.at >= len(r.buf):
                return

    def _body(self, header: str) -> Steps[str]:
        """Parse one message up to and including the marker that ends it, and return the marker."""
        r, out = self._ctx.r, self._ctx.out
        recipients, channels = _RECIPIENT.findall(header), _CHANNEL.findall(header)
        recipient = recipients[-1] if recipients else ""
        if recipient == "self" or (recipient in ("", *_NON_TOOL_RECIPIENTS) and channels[-1:] == ["analysis"]):
            out.open_reasoning()
            hit = yield from r.until(self._stop, out.reasoning)
            out.end_reasoning()
            return hit
        if recipient and recipient not in _NON_TOOL_RECIPIENTS and self._parse_tools and not self._channels.body:
            if not (yield from attempt(self._ctx, _CallBody(recipient), "", out.text)):
                out.malformed += 1
            return (yield from r.until(self._stop, out.text))
        # Messages to the user may quote calls, so only messages to other recipients are searched for calls.
        stop = self._stop if recipient in _NON_TOOL_RECIPIENTS else self._text
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


@dataclass(frozen=True, slots=True)
class _CallBody:
    """Format of the body of a message to a tool."""

    recipient: str
    starts: tuple[str, ...] = ()
    ends: tuple[str, ...] = HARMONY.ends

    def calls(self, ctx: ParserContext, hit: str) -> Steps[None]:
        r = ctx.r
        char = yield from r.space()
        name = checked(self.recipient.removeprefix("functions."))
        if char in ("{", '"'):
            yield from json_arguments(ctx, begin(ctx, name))
            yield from expect_end(r)
        elif (yield from r.until(markers(*self.ends), drop, 0, keep=True)) or not (char or r.is_cut):
            begin(ctx, name)
            ctx.out.args("{}")
        else:
            raise Malformed
        end(ctx)
        yield from ctx.r.space()
