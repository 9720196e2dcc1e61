"""Interface of a speech-to-text model: it takes samples and yields one window of the transcript after another.

Control tokens that clients write in texts. A model family's library would encode them as tokens, not as text.

Transcribers of mlx-audio that transcribe one window of audio per call of `generate`. Windows are cut at the quietest
place near their end.
"""

import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten

from protocol.from_worker import Segment, Word
from protocol.to_worker import Sampling, TranscribePrompt

# Matches punctuation. An added token of letters and spaces only is ordinary text.
_PUNCTUATION: Final = re.compile(r"[^\w\s]")


class AddedTokens:
    """Added tokens of a tokenizer; unlike the tokenizer, usable from any thread. Empty without a tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        texts = sorted(
            {str(each.content) for each in added if _PUNCTUATION.search(str(each.content))}, key=len, reverse=True
        )
        self._pattern = re.compile("|".join(map(re.escape, texts))) if texts else None

    def first(self, text: str) -> str:
        """Return the first control token in a text, before or after Unicode normalization; "" if there is none."""
        if self._pattern is None:
            return ""
        match = self._pattern.search(text) or self._pattern.search(unicodedata.normalize("NFKC", text))
        return match.group() if match is not None else ""


Samples = npt.NDArray[np.float32]
# Callback that raises when the request has ended, or when the loop must end.
Check = Callable[[], None]


@dataclass(frozen=True, slots=True)
class AudioWindow:
    """Text and tokens of one window. The text continues the previous window's text."""

    text: str
    tokens: Sequence[int]
    segments: tuple[Segment, ...]
    language: str = ""


class Transcriber(Protocol):
    """Interface of a loaded speech-to-text model. Times are in seconds, `rate` is in samples per second."""

    rate: int
    languages: tuple[str, ...]
    translates: bool
    has_words: bool
    # Whether the model takes a text prompt.
    has_text: bool
    # Control tokens that a text prompt must not contain.
    marks: AddedTokens

    def language(self, name: str) -> str:
        """Return the model's code of a language, given the language's code or name. Raises `KeyError`."""
        ...

    def transcribe(
        self, samples: Samples, prompt: TranscribePrompt, sampling: Sampling, check: Check
    ) -> Iterator[AudioWindow]:
        """Yield all windows, each computed on demand. `check` is called at least once per window.

        The language of `prompt` is a code of the model; empty means detection. `prompt` has no clip: its sound is in
        `samples`.
        """
        ...


# Maximum length of a window, which is also the longest delay of an abort.
_WINDOW_S: Final = 30.0
# Maximum tokens per second of speech; a model that does not end would otherwise generate for minutes.
_MAX_TOKENS_PER_SECOND: Final = 16
_MIN_TOKENS: Final = 64
# Fraction at the end of each window that is searched for the place to cut.
_SEARCHED_FRACTION: Final = 1 / 3
# Step in seconds of the search for the quietest place.
_STRIDE_S: Final = 0.01
# Length in seconds of the quiet part in whose middle a window is cut.
_QUIET_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class TranscriberFamily:
    """Call of `generate` for one family, and the options that the family supports.

    `arguments` takes the model, the maximum number of tokens of a window, and the request. `languages` maps codes to
    the names of languages.
    """

    arguments: Callable[[Any, int, TranscribePrompt, Sampling], dict[str, Any]]
    languages: Mapping[str, str]
    has_text: bool = False
    has_words: bool = False


def _moonshine(_model: Any, tokens: int, _prompt: TranscribePrompt, sampling: Sampling) -> dict[str, Any]:
    return {"max_tokens": tokens, "temperature": sampling.temperature}


def _qwen(_model: Any, tokens: int, prompt: TranscribePrompt, sampling: Sampling) -> dict[str, Any]:
    return {
        "max_tokens": tokens,
        "temperature": sampling.temperature,
        "language": _QWEN_LANGUAGES[prompt.language] if prompt.language else None,
        "system_prompt": prompt.text or None,
    }


def _parakeet(model: Any, _tokens: int, _prompt: TranscribePrompt, _sampling: Sampling) -> dict[str, Any]:
    # Parakeet bounds the tokens per frame itself; its samples must have the dtype of its weights.
    parameters: Any = tree_flatten(model.parameters())
    return {"dtype": next(array.dtype for _, array in parameters)}


# Languages in Qwen's model card.
_QWEN_LANGUAGES: Final = {
    "zh": "Chinese", "en": "English", "yue": "Cantonese", "ar": "Arabic", "de": "German", "fr": "French",
    "es": "Spanish", "pt": "Portuguese", "id": "Indonesian", "it": "Italian", "ko": "Korean", "ru": "Russian",
    "th": "Thai", "vi": "Vietnamese", "ja": "Japanese", "tr": "Turkish", "hi": "Hindi", "ms": "Malay",
    "nl": "Dutch", "sv": "Swedish", "da": "Danish", "fi": "Finnish", "pl": "Polish", "cs": "Czech",
    "fil": "Filipino", "fa": "Persian", "el": "Greek", "ro": "Romanian", "hu": "Hungarian", "mk": "Macedonian",
}  # fmt: skip
FAMILIES: Final[dict[str, TranscriberFamily]] = {
    "moonshine": TranscriberFamily(_moonshine, {}),
    "qwen3_asr": TranscriberFamily(_qwen, _QWEN_LANGUAGES, has_text=True),
    "parakeet": TranscriberFamily(_parakeet, {}, has_words=True),
}


class SegmentedTranscriber:
    """Loaded model of one of the families in the table."""

    translates = False

    def __init__(self, family: str, model: Any) -> None:
        self._family = FAMILIES[family]
        self._model = model
        self.rate = int(getattr(model, "sample_rate", 0) or model.preprocessor_config.sample_rate)
        self.languages = tuple(self._family.languages)
        self.has_text = self._family.has_text
        self.has_words = self._family.has_words
        self.marks = AddedTokens(getattr(model, "_tokenizer", None))

    def language(self, name: str) -> str:
        for code, known in self._family.languages.items():
            if name.lower() in (code, known.lower()):
                return code
        raise KeyError(name)

    def transcribe(
        self, samples: Samples, prompt: TranscribePrompt, sampling: Sampling, check: Check
    ) -> Iterator[AudioWindow]:
        for at, (start, end) in enumerate(windows(samples, self.rate, _WINDOW_S)):
            check()
            mx.random.seed((sampling.seed + start) % (1 << 64))
            seconds = (end - start) / self.rate
            tokens = max(_MIN_TOKENS, int(seconds * _MAX_TOKENS_PER_SECOND))
            arguments = self._family.arguments(self._model, tokens, prompt, sampling)
            result = self._model.generate(mx.array(samples[start:end]), **arguments)
            yield self._window(result, start / self.rate, seconds, is_first=at == 0)

    def _window(self, result: Any, offset: float, seconds: float, *, is_first: bool) -> AudioWindow:
        text = str(result.text).strip()
        sentences = getattr(result, "sentences", None)
        if sentences is not None:
            segments = tuple(_sentence(each, offset) for each in sentences)
            count = sum(len(each.tokens) for each in segments)
        else:
            segments = (Segment(round(offset, 3), round(offset + seconds, 3), text),) if text else ()
            count = int(getattr(result, "generation_tokens", 0) or 0)
        language = getattr(result, "language", None)
        detected = language[0] if isinstance(language, list) and language else language
        return AudioWindow(
            text if is_first or not text else " " + text,
            (0,) * count,
            segments,
            str(detected).lower() if detected else "",
        )


def _sentence(sentence: Any, offset: float) -> Segment:
    """Convert a sentence of Parakeet, whose tokens have times."""
    words: list[Word] = []
    for token in sentence.tokens:
        start, end = round(offset + token.start, 3), round(offset + token.end, 3)
        if words and not token.text.startswith(" "):
            words[-1] = Word(words[-1].word + token.text, words[-1].start, end)
        else:
            words.append(Word(token.text, start, end))
    return Segment(
        round(offset + sentence.start, 3),
        round(offset + sentence.end, 3),
        sentence.text,
        tuple(int(token.id) for token in sentence.tokens),
        words=tuple(words),
    )


def windows(samples: Samples, rate: int, most_s: float) -> Iterator[tuple[int, int]]:
    """Yield the first sample and the end of each window; a window has at most `most_s` seconds."""
    longest = int(most_s * rate)
    start = 0
    while len(samples) - start > longest:
        first = start + int(longest * (1 - _SEARCHED_FRACTION))
        end = first + _quietest(samples[first : start + longest], rate)
        yield start, end
        start = end
    yield start, len(samples)


def _quietest(part: Samples, rate: int) -> int:
    """Return the middle of the quietest tenth of a second of a part. If several are equally quiet, the last one
    counts."""
    stride, length = max(1, int(_STRIDE_S * rate)), max(1, int(_QUIET_S * rate))
    energy = np.concatenate([np.zeros(1), np.cumsum(np.square(part, dtype=np.float64))])
    starts = np.arange(0, max(1, len(part) - length + 1), stride)
    sums = energy[np.minimum(starts + length, len(part))] - energy[starts]
    quietest = int(starts[len(sums) - 1 - int(np.argmin(sums[::-1]))])
    return max(1, quietest + length // 2)
