"""Numbered choices of chat completions and completions, streamed side by side or folded into one."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType
from msgspec.structs import replace

from gateway.api.openai.prompt_logprobs import encode_entries, whole
from gateway.api.openai.response import TokenIds, UsageBody, sum_usage
from gateway.errors import ApiError, openai_body
from protocol.messages import Delta, DeltaKind, Finish, Usage

# A choice as it is written.
C = TypeVar("C", bound=Struct)
# One that is not whole yet.
P = TypeVar("P", bound="Partial")

DONE: Final = b"data: [DONE]\n\n"

encode: Final = msgspec.json.Encoder().encode
# Looking up a member of an enum takes as long as encoding a word.
_TEXT: Final = DeltaKind.TEXT


@dataclass(frozen=True, slots=True)
class Heading:
    """Fields common to every chunk and the whole answer. `is_legacy`: calls have the shape from before tools.
    `tells_ids`: ids of the prompt and of the output stand beside the text."""

    id: str
    created: int
    model: str
    choices: int
    choices_per_prompt: int = 1
    is_legacy: bool = False
    tells_ids: bool = False


@dataclass(slots=True)
class Partial:
    """One choice so far. Owned by its fold."""

    finish: Finish = Finish.STOP
    usage: Usage | None = None
    token_ids: list[int] = field(default_factory=list[int])
    # Of its prompt: ids, and log-probabilities as JSON.
    prompt_ids: tuple[int, ...] = ()
    prompt_logprobs: list[bytes] = field(default_factory=list[bytes])


class ChoiceStream(ABC, Generic[C]):
    """A `StreamEncoder`. The common chunk, a piece of text, is a prebuilt prefix and suffix around the encoded text.

    `shape` makes a chunk of id, time, model, choices and usage; `key` is the field of a choice that holds its text.
    """

    def __init__(
        self,
        heading: Heading,
        include_usage: bool,
        shape: Callable[[str, int, str, list[C], UsageBody | UnsetType | None], Struct],
        key: str,
    ) -> None:
        self._heading = heading
        self._include_usage = include_usage
        self._shape = shape
        self._key = f'"{key}":""'.encode()
        self._tells_ids = heading.tells_ids
        self._usages: dict[int, Usage] = {}
        self._choices: dict[int, int] = {}
        # rid -> the bytes before a piece of text; the bytes after it are the same for all.
        self._before: dict[int, bytes] = {}
        self._after = b""

    def bind(self, rids: Sequence[int]) -> None:
        self._choices = {rid: index for index, rid in enumerate(rids)}
        for rid, index in self._choices.items():
            # Quotes inside a string are escaped, so this can only be the key itself.
            head, key, self._after = self._event(self._blank(index)).partition(self._key)
            self._before[rid] = head + key[:-2]

    def encode(self, deltas: Sequence[Delta]) -> bytes:
        parts: list[bytes] = []
        for delta in deltas:
            if delta.kind is _TEXT and delta.finish is None and delta.logprobs is None and not self._tells_ids:
                if delta.text:
                    parts += (self._before[delta.rid], encode(delta.text), self._after)
            else:
                parts.append(self._encode_any(delta))
        return b"".join(parts)

    def error(self, error: ApiError) -> bytes:
        return b"data: " + openai_body(error) + b"\n\n"

    def end(self) -> bytes:
        if not self._include_usage:
            return DONE
        ordered = [self._usages[rid] for rid in self._choices if rid in self._usages]
        return self._chunk([], sum_usage(ordered, self._heading.choices_per_prompt)) + DONE

    @abstractmethod
    def _blank(self, index: int) -> C:
        """A choice that says an empty text."""

    @abstractmethod
    def _said(self, index: int, delta: Delta) -> C | None:
        """The chunk's choice for a delta; None for a delta that is not sent to clients."""

    @abstractmethod
    def _ended(self, index: int, finish: Finish) -> C:
        """The last of a choice: why it ended."""

    @abstractmethod
    def _opened(self, index: int, ids: Sequence[int]) -> bytes:
        """The first chunk of a choice whose prompt's ids are told."""

    def _encode_any(self, delta: Delta) -> bytes:
        index = self._choices[delta.rid]
        if delta.prompt is not None:
            return self._opened(index, delta.prompt.ids)
        choice = self._said(index, delta)
        if self._tells_ids:
            choice = self._with_ids(index, choice, delta.token_ids)
        events = b"" if choice is None else self._event(choice)
        if delta.finish is not None:
            if delta.usage is not None:
                self._usages[delta.rid] = delta.usage
            ended = self._ended(index, delta.finish)
            events += self._event(replace(ended, token_ids=delta.ending_ids) if self._tells_ids else ended)
        return events

    def _with_ids(self, index: int, choice: C | None, ids: Sequence[int]) -> C | None:
        """A choice with its ids, which are sent even where the text is held back."""
        if choice is None and not ids:
            return None
        return replace(self._blank(index) if choice is None else choice, token_ids=ids)

    def _event(self, choice: C) -> bytes:
        return self._chunk([choice], None)

    def _chunk(self, choices: list[C], usage: UsageBody | None) -> bytes:
        heading = self._heading
        shown = usage if self._include_usage else UNSET
        return event(self._shape(heading.id, heading.created, heading.model, choices, shown))


def event(chunk: Struct) -> bytes:
    """A chunk as a server-sent event."""
    return b"data: " + encode(chunk) + b"\n\n"


class ChoiceFold(ABC, Generic[C, P]):
    """A `Fold`: what the stream would have sent, in one piece."""

    def __init__(
        self,
        heading: Heading,
        shape: Callable[[str, int, str, list[C], UsageBody], Struct],
        start: Callable[[], P],
    ) -> None:
        self._heading = heading
        self._shape = shape
        self._start = start
        self._choices: dict[int, P] = {}
        self._prompts: list[tuple[Raw | UnsetType, TokenIds]] = []

    def bind(self, rids: Sequence[int]) -> None:
        self._choices = {rid: self._start() for rid in rids}

    def add(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            choice = self._choices[delta.rid]
            if delta.prompt is not None:
                choice.prompt_ids = choice.prompt_ids or delta.prompt.ids
                if delta.prompt.logprobs:
                    choice.prompt_logprobs.append(encode_entries(delta.prompt.logprobs))
                continue
            self._take(choice, delta)
            choice.token_ids += delta.token_ids
            if delta.finish is not None:
                choice.finish, choice.usage = delta.finish, delta.usage
                choice.token_ids += delta.ending_ids

    def result(self) -> bytes:
        heading = self._heading
        self._prompts = [self._told(each) for each in list(self._choices.values())[:: heading.choices_per_prompt]]
        choices = [self._whole(index, choice) for index, choice in enumerate(self._choices.values())]
        usages = [choice.usage for choice in self._choices.values() if choice.usage is not None]
        usage = sum_usage(usages, heading.choices_per_prompt)
        return encode(self._answer(self._shape(heading.id, heading.created, heading.model, choices, usage)))

    def _answer(self, answer: Struct) -> Struct:
        """The answer with all that is told of the prompt beside its choices."""
        return answer

    def _ids_of(self, choice: P) -> TokenIds:
        """The ids of a choice, if they are told."""
        return choice.token_ids if self._heading.tells_ids else UNSET

    def _prompt_of(self, index: int) -> tuple[Raw | UnsetType, TokenIds]:
        """Log-probabilities and ids of a choice's prompt, as far as they are told: with the first of its choices."""
        return self._prompts[index // self._heading.choices_per_prompt]

    def _told(self, first: P) -> tuple[Raw | UnsetType, TokenIds]:
        logprobs = whole(first.prompt_logprobs) if first.prompt_logprobs else UNSET
        first.prompt_logprobs.clear()
        return logprobs, first.prompt_ids if self._heading.tells_ids else UNSET

    @abstractmethod
    def _take(self, choice: P, delta: Delta) -> None:
        """Add what a delta says to its choice."""

    @abstractmethod
    def _whole(self, index: int, choice: P) -> C:
        """A choice with all that was said."""
