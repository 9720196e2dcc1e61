"""OpenAI text completions: the canonical events encoded as chunks, or folded into one answer."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from gateway.api.openai.choices import ChoiceFold, ChoiceStream, Heading, Partial
from gateway.api.openai.response import (
    TextChoice,
    TextCompletion,
    TextLogprobsBuilder,
    TextLogprobsParts,
    finish_reason,
)
from protocol.from_worker import Delta, Finish


class TextStream(ChoiceStream[TextChoice]):
    """Encoder of a completion stream, in which deltas of every kind are sent as text."""

    def __init__(self, heading: Heading, include_usage: bool) -> None:
        super().__init__(heading, include_usage, TextCompletion, "text")
        self._builders: dict[int, TextLogprobsBuilder] = {}

    def _blank(self, index: int) -> TextChoice:
        return TextChoice(index, "")

    def _choice_for(self, index: int, delta: Delta) -> TextChoice | None:
        if delta.logprobs is None:
            return TextChoice(index, delta.text) if delta.text else None
        builder = self._builders.setdefault(index, TextLogprobsBuilder())
        return TextChoice(index, delta.text, builder.build(delta.text, delta.logprobs))

    def _opened(self, index: int, ids: Sequence[int]) -> bytes:
        return self._event(TextChoice(index, "", token_ids=(), prompt_token_ids=ids))

    def _ended(self, index: int, finish: Finish) -> TextChoice:
        return TextChoice(index, "", finish_reason=_reason(finish))


@dataclass(slots=True)
class _PartialText(Partial):
    text: list[str] = field(default_factory=list[str])
    logprobs: TextLogprobsParts | None = None


class TextFold(ChoiceFold[TextChoice, _PartialText]):
    """`Fold` of a whole text completion, with the same content as `TextStream`."""

    def __init__(self, heading: Heading) -> None:
        super().__init__(heading, TextCompletion, _PartialText)

    def _take(self, choice: _PartialText, delta: Delta) -> None:
        choice.text.append(delta.text)
        if delta.logprobs is not None:
            choice.logprobs = choice.logprobs or TextLogprobsParts()
            choice.logprobs.add(delta.text, delta.logprobs)

    def _whole(self, index: int, choice: _PartialText) -> TextChoice:
        logprobs = None if choice.logprobs is None else choice.logprobs.whole()
        reason, ids = _reason(choice.finish), self._ids_of(choice)
        return TextChoice(index, "".join(choice.text), logprobs, reason, ids, *self._prompt_of(index))


def _reason(finish: Finish) -> str:
    # Text completions have no tools.
    return "stop" if finish is Finish.TOOL_CALLS else finish_reason(finish)
