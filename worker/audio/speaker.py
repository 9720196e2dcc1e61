"""Models that speak: families of mlx-audio, whose `generate` is called for one group of sentences after the other."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import mlx.core as mx
import numpy as np

from worker.audio.marks import AddedTokens
from worker.audio.sentences import groups
from worker.audio.transcriber import Check, Samples


@dataclass(frozen=True, slots=True)
class SpeakOptions:
    """Speech as a request wants it. `voice` is one of the model's own; empty is its choice."""

    text: str
    voice: str = ""
    instructions: str = ""
    seed: int = 0


class Instructions(Enum):
    """Whether a model can, or has to, be told how to speak."""

    NONE = 0
    TAKEN = 1
    NEEDED = 2


@dataclass(frozen=True, slots=True)
class SpeakerFamily:
    """Call of a family's `generate` for a text, of so many characters in one go.

    `voices` are those of a loaded model, `instructions` whether it takes some.
    """

    arguments: Callable[[str, SpeakOptions], dict[str, Any]]
    least_chars: int
    most_chars: int
    voices: Callable[[Any], tuple[str, ...]] = lambda _model: ()
    instructions: Callable[[Any], Instructions] = lambda _model: Instructions.NONE
    # The library encodes texts as they are. Otherwise it takes out the signs of which control tokens are made.
    shows_marks: bool = True


def _soprano(text: str, _speech: SpeakOptions) -> dict[str, Any]:
    # Its tokens last 64 ms. Nobody takes longer over text; a model that does not end would speak for minutes.
    return {"text": text, "max_tokens": int((1.0 + len(text) * _CHAR_S) / 0.064)}


# The longest that a character is spoken, on average over a text.
_CHAR_S: Final = 0.2


def _qwen(text: str, speech: SpeakOptions) -> dict[str, Any]:
    # 12.5 tokens a second.
    return {
        "text": text,
        "voice": speech.voice or None,
        "instruct": speech.instructions or None,
        "max_tokens": int((1.0 + len(text) * _CHAR_S) * 12.5),
    }


def _qwen_voices(model: Any) -> tuple[str, ...]:
    return tuple(model.get_supported_speakers())


def _qwen_instructions(model: Any) -> Instructions:
    if model.config.tts_model_type == "voice_design":
        return Instructions.NEEDED
    # The library leaves them out for the small one.
    return Instructions.NONE if model.config.tts_model_size == "0b6" else Instructions.TAKEN


FAMILIES: Final[dict[str, SpeakerFamily]] = {
    # It joins what is shorter itself.
    "soprano": SpeakerFamily(_soprano, least_chars=30, most_chars=300, shows_marks=False),
    "qwen3_tts": SpeakerFamily(
        _qwen, least_chars=60, most_chars=300, voices=_qwen_voices, instructions=_qwen_instructions
    ),
}


class Speaker:
    """One loaded model of a family of the table."""

    def __init__(self, family: str, model: Any) -> None:
        self._family = FAMILIES[family]
        self._model = model
        self.rate = int(model.sample_rate)
        self.voices = self._family.voices(model)
        self.instructions = self._family.instructions(model)
        self.marks = AddedTokens(getattr(model, "tokenizer", None)) if self._family.shows_marks else AddedTokens(None)

    def speak(self, speech: SpeakOptions, check: Check) -> Iterator[tuple[Samples, bool]]:
        """Samples at `rate`, and whether they are the last of a turn. Each is computed when it is asked for.

        Calls `check` between two.
        """
        family = self._family
        for at, text in enumerate(groups(speech.text, family.least_chars, family.most_chars)):
            check()
            mx.random.seed((speech.seed + at) % (1 << 64))
            held: Samples | None = None
            # What the library gives in one go is one turn: a model may keep state between two pieces of it.
            for result in self._model.generate(**family.arguments(text, speech)):
                check()
                if held is not None:
                    yield held, False
                held = np.array(result.audio, dtype=np.float32).reshape(-1)
            yield held if held is not None else np.zeros(0, np.float32), True
