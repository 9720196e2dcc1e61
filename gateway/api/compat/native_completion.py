"""Answers in the own form of llama.cpp's server, of `/completion` and `/infill`."""

from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec import UNSET, Struct, UnsetType

from gateway.api.openai.events import EventEncoder, event
from gateway.api.openai.response import PromptProgress
from protocol.from_worker import Delta, Finish, Progress, Usage

# Fields for llama.cpp's cache, slots and truncation. They are not needed: mlxd caches every prefix, and answers a
# prompt that is too long with a 400.
NO_ACTION: Final = frozenset({"cache_prompt", "id_slot", "n_keep"})
_EMPTY: Final = Usage(0, 0, 0)


class Timings(Struct, frozen=True):
    """Numbers of tokens and milliseconds for the prompt and for the output."""

    prompt_n: int
    prompt_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float


class NativeCompletion(Struct, frozen=True, kw_only=True):
    """A piece of the text, or all of it. The last has `stop` true, and the counts and timings."""

    content: str
    stop: bool
    model: str
    stop_type: str | UnsetType = UNSET
    stopping_word: str | UnsetType = UNSET
    tokens_predicted: int | UnsetType = UNSET
    tokens_evaluated: int | UnsetType = UNSET
    tokens_cached: int | UnsetType = UNSET
    truncated: bool | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET


class NativeEncoder(EventEncoder):
    """Encoder of deltas as llama.cpp's stream events, or as one whole answer."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._texts: list[str] = []
        self._end = Delta(0, finish=Finish.STOP)

    def encode(self, deltas: Sequence[Delta]) -> bytes:
        text = self._text(deltas)
        return event(NativeCompletion(content=text, stop=False, model=self._model)) if text else b""

    def add(self, deltas: Sequence[Delta]) -> None:
        self._texts.append(self._text(deltas))

    def progress(self, progress: Progress) -> bytes:
        """Encode the progress of a prefill as an event without text."""
        done = PromptProgress.of(progress)
        return event(NativeCompletion(content="", stop=False, model=self._model, prompt_progress=done))

    def end(self) -> bytes:
        return event(self._last(""))

    def result(self) -> bytes:
        return msgspec.json.encode(self._last("".join(self._texts)))

    def _text(self, deltas: Sequence[Delta]) -> str:
        """Return the text of these deltas. If they contain the last delta, record the end."""
        for delta in deltas:
            if delta.finish is not None:
                self._end = delta
        return "".join(delta.text for delta in deltas)

    def _last(self, text: str) -> NativeCompletion:
        usage, stop = self._end.usage or _EMPTY, self._end.stop
        is_cut = self._end.finish is Finish.LENGTH
        predicted = usage.completion
        evaluated = usage.prompt - usage.cached
        return NativeCompletion(
            content=text,
            stop=True,
            model=self._model,
            stop_type="limit" if is_cut else "word" if stop else "eos",
            stopping_word=stop,
            tokens_predicted=predicted,
            tokens_evaluated=usage.prompt,
            tokens_cached=usage.cached,
            truncated=False,
            timings=Timings(
                evaluated,
                usage.prefill_ms,
                _rate(evaluated, usage.prefill_ms),
                predicted,
                usage.decode_ms,
                _rate(predicted, usage.decode_ms),
            ),
        )


def _rate(count: int, ms: float) -> float:
    return count / ms * 1000 if ms > 0 else 0.0
