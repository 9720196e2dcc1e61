"""Text-to-speech families of mlx-audio: `generate` is called for one group of sentences after another."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import mlx.core as mx
import numpy as np

from protocol.prompts import SpeechPrompt
from worker.audio.marks import AddedTokens
from worker.audio.sentences import groups
from worker.audio.transcriber import Check, Samples


class Instructions(Enum):
    """Whether a model takes or needs instructions on how to speak."""

    NONE = 0
    TAKEN = 1
    NEEDED = 2


@dataclass(frozen=True, slots=True)
class SpeakerFamily:
    """Call of a family's `generate` for a text of `least_chars` to `most_chars` characters.

    `voices` and `instructions` read a loaded model's voices and whether it takes instructions.
    """

    arguments: Callable[[str, SpeechPrompt], dict[str, Any]]
    least_chars: int
    most_chars: int
    voices: Callable[[Any], tuple[str, ...]] = lambda _model: ()
    instructions: Callable[[Any], Instructions] = lambda _model: Instructions.NONE
    # Whether the library encodes control tokens in texts; otherwise it removes the characters that they consist of.
    shows_marks: bool = True


def _soprano(text: str, _prompt: SpeechPrompt) -> dict[str, Any]:
    # Tokens last 64 ms. The limit is for a model that does not end, which would speak for minutes.
    return {"text": text, "max_tokens": int((1.0 + len(text) * _MAX_SECONDS_PER_CHAR) / 0.064)}


# Maximum seconds of speech per character, averaged over a text.
_MAX_SECONDS_PER_CHAR: Final = 0.2


def _qwen(text: str, prompt: SpeechPrompt) -> dict[str, Any]:
    # Tokens last 80 ms.
    return {
        "text": text,
        "voice": prompt.voice or None,
        "instruct": prompt.instructions or None,
        "max_tokens": int((1.0 + len(text) * _MAX_SECONDS_PER_CHAR) * 12.5),
    }


def _qwen_voices(model: Any) -> tuple[str, ...]:
    return tuple(model.get_supported_speakers())


def _qwen_instructions(model: Any) -> Instructions:
    if model.config.tts_model_type == "voice_design":
        return Instructions.NEEDED
    # The library ignores instructions for the small model.
    return Instructions.NONE if model.config.tts_model_size == "0b6" else Instructions.TAKEN


FAMILIES: Final[dict[str, SpeakerFamily]] = {
    # The library itself joins shorter texts.
    "soprano": SpeakerFamily(_soprano, least_chars=30, most_chars=300, shows_marks=False),
    "qwen3_tts": SpeakerFamily(
        _qwen, least_chars=60, most_chars=300, voices=_qwen_voices, instructions=_qwen_instructions
    ),
}


class Speaker:
    """Loaded model of a family of the table."""

    def __init__(self, family: str, model: Any) -> None:
        self._family = FAMILIES[family]
        self._model = model
        self.rate = int(model.sample_rate)
        self.voices = self._family.voices(model)
        self.instructions = self._family.instructions(model)
        self.marks = AddedTokens(getattr(model, "tokenizer", None)) if self._family.shows_marks else AddedTokens(None)

    def speak(self, prompt: SpeechPrompt, seed: int, check: Check) -> Iterator[tuple[Samples, bool]]:
        """Yield samples at `rate`, and whether they end a turn. Each piece is computed on demand.

        The voice of `prompt` is one of `voices`; empty means the model's choice. Calls `check` between two pieces.
        """
        family = self._family
        for at, text in enumerate(groups(prompt.text, family.least_chars, family.most_chars)):
            check()
            mx.random.seed((seed + at) % (1 << 64))
            held: Samples | None = None
            # All results of one call are one turn: a model may keep state between them.
            for result in self._model.generate(**family.arguments(text, prompt)):
                check()
                if held is not None:
                    yield held, False
                held = np.array(result.audio, dtype=np.float32).reshape(-1)
            yield held if held is not None else np.zeros(0, np.float32), True
