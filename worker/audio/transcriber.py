"""Interface of a speech-to-text model: it takes samples and yields one window of the transcript after another."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from protocol.prompts import TranscribePrompt
from protocol.to_worker import Sampling
from protocol.transcript import Segment
from worker.audio.marks import AddedTokens

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
