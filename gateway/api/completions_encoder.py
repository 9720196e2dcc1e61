"""Canonical events as OpenAI text completion chunks, and folded into one completion."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET

from gateway.api.chat_encoder import DONE, Heading
from gateway.errors import ApiError, openai_body
from gateway.schemas.openai_out import (
    TextChoice,
    TextCompletion,
    TextLogprobs,
    TextLogprobsBuilder,
    UsageBody,
    finish_reason,
    sum_usage,
)
from protocol.messages import Delta, Finish, TokenLogprob, Usage

_encode = msgspec.json.Encoder().encode


class TextStream:
    """A `StreamEncoder`. Whatever kind a delta is of, a completion shows its text."""

    def __init__(self, heading: Heading, include_usage: bool) -> None:
        self._heading = heading
        self._include_usage = include_usage
        self._usages: dict[int, Usage] = {}
        self._choices: dict[int, int] = {}
        self._builders: dict[int, TextLogprobsBuilder] = {}
        self._text: dict[int, bytes] = {}
        self._text_end = b""

    def bind(self, rids: Sequence[int]) -> None:
        self._choices = {rid: index for index, rid in enumerate(rids)}
        self._builders = {rid: TextLogprobsBuilder() for rid in rids}
        for rid, index in self._choices.items():
            head, key, tail = self._event(TextChoice(index, "")).partition(b'"text":""')
            self._text[rid] = head + key[:-2]
            self._text_end = tail

    def begin(self, prompt_tokens: int) -> bytes:
        return b""

    def encode(self, deltas: Sequence[Delta]) -> bytes:
        parts: list[bytes] = []
        for delta in deltas:
            if delta.finish is None and delta.logprobs is None:
                if delta.text:
                    parts += (self._text[delta.rid], _encode(delta.text), self._text_end)
            else:
                parts.append(self._encode_any(delta))
        return b"".join(parts)

    def keepalive(self) -> bytes:
        return b": keepalive\n\n"

    def error(self, error: ApiError) -> bytes:
        return b"data: " + openai_body(error) + b"\n\n"

    def end(self) -> bytes:
        if not self._include_usage:
            return DONE
        ordered = [self._usages[rid] for rid in self._choices if rid in self._usages]
        return self._chunk([], sum_usage(ordered, self._heading.choices_per_prompt)) + DONE

    def _encode_any(self, delta: Delta) -> bytes:
        index = self._choices[delta.rid]
        events = b""
        logprobs = None if delta.logprobs is None else self._builders[delta.rid].build(delta.logprobs)
        if delta.text or logprobs is not None:
            events = self._event(TextChoice(index, delta.text, logprobs))
        if delta.finish is not None:
            if delta.usage is not None:
                self._usages[delta.rid] = delta.usage
            events += self._event(TextChoice(index, "", finish_reason=_reason(delta.finish)))
        return events

    def _event(self, choice: TextChoice) -> bytes:
        return self._chunk([choice], None)

    def _chunk(self, choices: list[TextChoice], usage: UsageBody | None) -> bytes:
        heading = self._heading
        shown = usage if self._include_usage else UNSET
        return b"data: " + _encode(TextCompletion(heading.id, heading.created, heading.model, choices, shown)) + b"\n\n"


@dataclass(slots=True)
class _Choice:
    """One choice so far. Owned by its `TextFold`."""

    text: list[str] = field(default_factory=list[str])
    logprobs: list[TokenLogprob] | None = None
    finish: str = "stop"
    usage: Usage | None = None


class TextFold:
    """A `Fold`: what `TextStream` would have sent, in one piece."""

    def __init__(self, heading: Heading) -> None:
        self._heading = heading
        self._choices: dict[int, _Choice] = {}

    def bind(self, rids: Sequence[int]) -> None:
        self._choices = {rid: _Choice() for rid in rids}

    def add(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            choice = self._choices[delta.rid]
            choice.text.append(delta.text)
            if delta.logprobs is not None:
                choice.logprobs = choice.logprobs if choice.logprobs is not None else []
                choice.logprobs += delta.logprobs
            if delta.finish is not None:
                choice.finish = _reason(delta.finish)
                choice.usage = delta.usage

    def result(self) -> bytes:
        heading = self._heading
        choices = [
            TextChoice(index, "".join(choice.text), _logprobs(choice), choice.finish)
            for index, choice in enumerate(self._choices.values())
        ]
        usages = [choice.usage for choice in self._choices.values() if choice.usage is not None]
        usage = sum_usage(usages, heading.choices_per_prompt)
        return _encode(TextCompletion(heading.id, heading.created, heading.model, choices, usage))


def _logprobs(choice: _Choice) -> TextLogprobs | None:
    return None if choice.logprobs is None else TextLogprobsBuilder().build(choice.logprobs)


def _reason(finish: Finish) -> str:
    # Completions know no tools.
    return "stop" if finish is Finish.TOOL_CALLS else finish_reason(finish)
