"""Text-to-speech families of mlx-audio: `generate` is called for one group of sentences after another.

Splitting of a text into groups of sentences, each of which a model speaks in one call.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import mlx.core as mx
import numpy as np

from protocol.to_worker import SpeechPrompt
from worker.audio.transcriber import AddedTokens, Check, Samples

# Matches ends of sentences, with closing quotation marks and brackets; a line break ends one as well. The lookbehind
# anchors at the start of whitespace, as long whitespace would otherwise take quadratic time.
_SENTENCE_END: Final = re.compile(r"(?<=[.!?…])[\"'”’)\]]*\s+|(?<=[。！？])|(?<![^\S\n])[^\S\n]*+\n\s*")
_SPACE: Final = re.compile(r"\s+")


def groups(text: str, least: int, most: int) -> list[str]:
    """Split the text into parts of at most `most` characters, and at least `least` if the text has as many.

    A part ends at the end of a sentence, or between two words of a longer sentence.
    """
    parts: list[str] = []
    for sentence in _sentences(text):
        for piece in _cut(sentence, most):
            is_joined = parts and len(parts[-1]) < least and len(parts[-1]) + 1 + len(piece) <= most
            if is_joined:
                parts[-1] = f"{parts[-1]} {piece}"
            else:
                parts.append(piece)
    return parts


def _sentences(text: str) -> list[str]:
    sentences: list[str] = []
    start = 0
    for end in _SENTENCE_END.finditer(text):
        sentences.append(text[start : end.end()])
        start = end.end()
    sentences.append(text[start:])
    return [plain for sentence in sentences if (plain := _SPACE.sub(" ", sentence).strip())]


def _cut(sentence: str, most: int) -> list[str]:
    pieces: list[str] = []
    while len(sentence) > most:
        at = sentence.rfind(" ", 0, most + 1)
        at = at if at > 0 else most
        pieces.append(sentence[:at].strip())
        sentence = sentence[at:].strip()
    return [*pieces, sentence] if sentence else pieces


class Instructions(Enum):
    """Whether a model ignores, accepts or needs instructions on how to speak."""

    NONE = 0
    TAKEN = 1
    NEEDED = 2


@dataclass(frozen=True, slots=True)
class SpeakerFamily:
    """Call of `generate` for one family, with a text of `least_chars` to `most_chars` characters.

    `voices` and `instructions` read a loaded model's voices, and whether the model takes instructions.
    """

    arguments: Callable[[str, SpeechPrompt], dict[str, Any]]
    least_chars: int
    most_chars: int
    voices: Callable[[Any], tuple[str, ...]] = lambda _model: ()
    instructions: Callable[[Any], Instructions] = lambda _model: Instructions.NONE
    # Whether mlx-audio encodes control tokens in texts; otherwise it removes the characters of which they consist.
    shows_marks: bool = True


def _soprano(text: str, _prompt: SpeechPrompt) -> dict[str, Any]:
    # A token lasts 64 ms. The limit stops a model that does not end by itself, which would speak for minutes.
    return {"text": text, "max_tokens": int((1.0 + len(text) * _MAX_SECONDS_PER_CHAR) / 0.064)}


# Maximum seconds of speech per character, averaged over a text.
_MAX_SECONDS_PER_CHAR: Final = 0.2


def _qwen(text: str, prompt: SpeechPrompt) -> dict[str, Any]:
    # A token lasts 80 ms.
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
    # mlx-audio ignores instructions for the small model.
    return Instructions.NONE if model.config.tts_model_size == "0b6" else Instructions.TAKEN


FAMILIES: Final[dict[str, SpeakerFamily]] = {
    # mlx-audio itself joins shorter texts for Soprano.
    "soprano": SpeakerFamily(_soprano, least_chars=30, most_chars=300, shows_marks=False),
    "qwen3_tts": SpeakerFamily(
        _qwen, least_chars=60, most_chars=300, voices=_qwen_voices, instructions=_qwen_instructions
    ),
}


class Speaker:
    """Loaded model of one of the families in the table."""

    def __init__(self, family: str, model: Any) -> None:
        self._family = FAMILIES[family]
        self._model = model
        self.rate = int(model.sample_rate)
        self.voices = self._family.voices(model)
        self.instructions = self._family.instructions(model)
        self.marks = AddedTokens(getattr(model, "tokenizer", None)) if self._family.shows_marks else AddedTokens(None)

    def speak(self, prompt: SpeechPrompt, seed: int, check: Check) -> Iterator[tuple[Samples, bool]]:
        """Yield samples at `rate`, and whether they end a turn. Each piece is computed on demand.

        The voice of `prompt` is one of `voices`; empty means the model's default. `check` is called between two pieces.
        """
        family = self._family
        for at, text in enumerate(groups(prompt.text, family.least_chars, family.most_chars)):
            check()
            mx.random.seed((seed + at) % (1 << 64))
            held: Samples | None = None
            # All results of one call belong to one turn, because a model may keep state between them.
            for result in self._model.generate(**family.arguments(text, prompt)):
                check()
                if held is not None:
                    yield held, False
                held = np.array(result.audio, dtype=np.float32).reshape(-1)
            yield held if held is not None else np.zeros(0, np.float32), True
