"""Port to a model that hears: samples in, one window of a transcript after the other out."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from protocol.transcript import Segment
from worker.audio.marks import AddedTokens

Samples = npt.NDArray[np.float32]
# Raises when the request has ended meanwhile, or the loop is to end.
Check = Callable[[], None]


@dataclass(frozen=True, slots=True)
class TranscribeOptions:
    """A transcript as a request wants it. `language` is one of the model's own codes; empty is as heard."""

    language: str = ""
    text: str = ""
    is_translated: bool = False
    has_words: bool = False
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class AudioWindow:
    """Text of one window, which follows on that of the window before, with its own tokens."""

    text: str
    tokens: Sequence[int]
    segments: tuple[Segment, ...]
    language: str = ""


class Transcriber(Protocol):
    """A loaded model that hears. Times are in seconds, `rate` in samples a second."""

    rate: int
    languages: tuple[str, ...]
    translates: bool
    has_words: bool
    # The model takes text before what it hears.
    has_text: bool
    # What that text may not hold.
    marks: AddedTokens

    def language(self, name: str) -> str:
        """The model's code of a language, by its code or name. Raises `KeyError`."""
        ...

    def hear(self, samples: Samples, wish: TranscribeOptions, check: Check) -> Iterator[AudioWindow]:
        """All windows, each computed when it is asked for. Calls `check` at least once a window."""
        ...
