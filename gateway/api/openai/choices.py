"""Numbered choices of chat and text completions. They are streamed in parallel or combined into one answer."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType
from msgspec.structs import replace

from gateway.api.common.request_fields import MakeExtras, no_extras
from gateway.api.openai.response import (
    EventEncoder,
    PromptProgress,
    TokenIds,
    UsageBody,
    encode_entries,
    event,
    sum_usage,
    whole,
)
from protocol.from_worker import Delta, DeltaKind, Finish, Progress, Usage

# `C` is the struct of an encoded choice.
C = TypeVar("C", bound=Struct)
# `P` is a choice that is not complete yet.
P = TypeVar("P", bound="Partial")

DONE: Final = b"data: [DONE]\n\n"

encode: Final = msgspec.json.Encoder().encode
# The member is looked up once, because looking up an enum's member takes as long as encoding a word.
_TEXT: Final = DeltaKind.TEXT


@dataclass(frozen=True, slots=True)
class Heading:
    """Fields that all chunks, or the whole answer, have.

    `is_legacy` gives calls the form that OpenAI used before tools. `sends_ids` adds the token ids of the prompt and the
    output.
    """

    id: str
    created: int
    model: str
    choices: int
    choices_per_prompt: int = 1
    is_legacy: bool = False
    sends_ids: bool = False
    extras: MakeExtras = no_extras


@dataclass(slots=True)
class Partial:
    """A choice that is not complete yet."""

    finish: Finish = Finish.STOP
    usage: Usage | None = None
    token_ids: list[int] = field(default_factory=list[int])
    # Token ids of the choice's prompt, and the prompt's log-probabilities as JSON.
    prompt_ids: tuple[int, ...] = ()
    prompt_logprobs: list[bytes] = field(default_factory=list[bytes])


class ChoiceStream(EventEncoder, ABC, Generic[C]):
    """`StreamEncoder` of choices.

    The usual chunk, a piece of text, is made of a prebuilt prefix, the text and a prebuilt suffix. `shape` makes a
    chunk from id, time, model, choices and usage; `key` is the choice's field that holds its text.
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
        self._sends_ids = heading.sends_ids
        self._usages: dict[int, Usage] = {}
        self._choices: dict[int, int] = {}
        # Maps request ids to the prefix of the usual chunk. Its suffix is the same for all.
        self._before: dict[int, bytes] = {}
        self._after = b""

    def bind(self, rids: Sequence[int]) -> None:
        self._choices = {rid: index for index, rid in enumerate(rids)}
        for rid, index in self._choices.items():
            # Quotes inside a string are escaped, so only the key itself can match.
            head, key, self._after = self._event(self._blank(index)).partition(self._key)
            self._before[rid] = head + key[:-2]

    def encode(self, deltas: Sequence[Delta]) -> bytes:
        parts: list[bytes] = []
        for delta in deltas:
            if delta.kind is _TEXT and delta.finish is None and delta.logprobs is None and not self._sends_ids:
                if delta.text:
                    parts += (self._before[delta.rid], encode(delta.text), self._after)
            else:
                parts.append(self._encode_any(delta))
        return b"".join(parts)

    def end(self) -> bytes:
        extras = self._heading.extras()
        if not self._include_usage and extras is UNSET:
            return DONE
        ordered = [self._usages[rid] for rid in self._choices if rid in self._usages]
        last = self._make([], sum_usage(ordered, self._heading.choices_per_prompt))
        return event(replace(last, x_mlxd=extras)) + DONE

    def progress(self, progress: Progress) -> bytes:
        """Encode the progress of a prefill in llama.cpp's form, as a chunk without text."""
        chunk = self._make([self._blank(self._choices[progress.rid])], None)
        return event(replace(chunk, prompt_progress=PromptProgress.of(progress)))

    @abstractmethod
    def _blank(self, index: int) -> C:
        """Make a choice with an empty text."""

    @abstractmethod
    def _choice_for(self, index: int, delta: Delta) -> C | None:
        """Make the choice for a delta's chunk; None for a delta that clients do not get."""

    @abstractmethod
    def _ended(self, index: int, finish: Finish) -> C:
        """Make the last choice, with its finish reason."""

    @abstractmethod
    def _opened(self, index: int, ids: Sequence[int]) -> bytes:
        """Encode the first chunk of a choice, with the ids of the choice's prompt."""

    def _encode_any(self, delta: Delta) -> bytes:
        index = self._choices[delta.rid]
        if delta.prompt is not None:
            return self._opened(index, delta.prompt.ids)
        choice = self._choice_for(index, delta)
        if self._sends_ids:
            choice = self._with_ids(index, choice, delta.token_ids)
        events = b"" if choice is None else self._event(choice)
        if delta.finish is not None:
            if delta.usage is not None:
                self._usages[delta.rid] = delta.usage
            ended = self._ended(index, delta.finish)
            events += self._event(replace(ended, token_ids=delta.ending_ids) if self._sends_ids else ended)
        return events

    def _with_ids(self, index: int, choice: C | None, ids: Sequence[int]) -> C | None:
        """Add token ids to a choice, even if their text is still held back."""
        if choice is None and not ids:
            return None
        return replace(self._blank(index) if choice is None else choice, token_ids=ids)

    def _event(self, choice: C) -> bytes:
        return event(self._make([choice], None))

    def _make(self, choices: list[C], usage: UsageBody | None) -> Struct:
        heading = self._heading
        shown = usage if self._include_usage else UNSET
        return self._shape(heading.id, heading.created, heading.model, choices, shown)


class ChoiceFold(ABC, Generic[C, P]):
    """`Fold` of choices into one answer, with the same content as the stream."""

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
            self._add(choice, delta)
            choice.token_ids += delta.token_ids
            if delta.finish is not None:
                choice.finish, choice.usage = delta.finish, delta.usage
                choice.token_ids += delta.ending_ids

    def result(self) -> bytes:
        heading = self._heading
        self._prompts = [
            self._prompt_fields(each) for each in list(self._choices.values())[:: heading.choices_per_prompt]
        ]
        choices = [self._whole(index, choice) for index, choice in enumerate(self._choices.values())]
        usages = [choice.usage for choice in self._choices.values() if choice.usage is not None]
        usage = sum_usage(usages, heading.choices_per_prompt)
        answer = self._shape(heading.id, heading.created, heading.model, choices, usage)
        return encode(replace(self._answer(answer), x_mlxd=heading.extras()))

    def _answer(self, answer: Struct) -> Struct:
        """Add fields about the prompt to the whole answer. The default adds none; chat completions override this."""
        return answer

    def _ids_of(self, choice: P) -> TokenIds:
        """Return the output ids of a choice, if they were requested."""
        return choice.token_ids if self._heading.sends_ids else UNSET

    def _prompt_of(self, index: int) -> tuple[Raw | UnsetType, TokenIds]:
        """Return the requested log-probabilities and token ids of a choice's prompt. They are stored in the prompt's
        first choice.
        """
        return self._prompts[index // self._heading.choices_per_prompt]

    def _prompt_fields(self, first: P) -> tuple[Raw | UnsetType, TokenIds]:
        logprobs = whole(first.prompt_logprobs) if first.prompt_logprobs else UNSET
        first.prompt_logprobs.clear()
        return logprobs, first.prompt_ids if self._heading.sends_ids else UNSET

    @abstractmethod
    def _add(self, choice: P, delta: Delta) -> None:
        """Add a delta to its choice."""

    @abstractmethod
    def _whole(self, index: int, choice: P) -> C:
        """Make the complete choice."""
