"""Media of a prompt and the spans of tokens that they fill."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]

# A digest of 32 bytes has this many words of 4 bytes.
_WORDS: Final = 8
_POSITIVE: Final = 2**31 - 1


def digest_words(key: bytes) -> Tokens:
    """Convert a digest of 32 bytes to 8 negative ids, which no vocabulary has, for media in prefix cache keys."""
    return (-1 - np.frombuffer(key, dtype="<u4", count=_WORDS).astype(np.int64) % _POSITIVE).astype(np.int32)


@dataclass(slots=True, eq=False)
class Medium:
    """Image, video or audio clip of a prompt.

    `key` is a digest of 32 bytes over everything that affects the medium's features or positions (bytes, kind, options
    and processor), and over the salt of its request. `tokens` is the number of its placeholders in the prompt and of
    its feature rows. `load` decodes, resizes and normalizes: it returns the inputs of the tower by name, may be called
    from any thread, and raises `RequestInvalid` for broken data.
    """

    kind: str
    key: bytes
    tokens: int
    load: Callable[[], dict[str, npt.NDArray[np.generic]]]
    words: Tokens = field(init=False)

    def __post_init__(self) -> None:
        self.words = digest_words(self.key)


@dataclass(slots=True, frozen=True)
class Span:
    """Range of tokens [begin, end) of a prompt; they represent the rows of a medium's features from row `first` on."""

    begin: int
    end: int
    medium: Medium
    first: int = 0


def media_keys(tokens: Tokens, spans: Sequence[Span]) -> Tokens:
    """Replace the placeholders of media by words of the media's digests: equal keys mean equal content."""
    if not spans:
        return tokens
    keys = tokens.copy()
    for span in spans:
        length = min(span.end, len(keys)) - span.begin
        if length > 0:
            keys[span.begin : span.begin + length] = span.medium.words[
                np.arange(span.first, span.first + length) % _WORDS
            ]
    return keys


def before_media(spans: Sequence[Span], at: int) -> int:
    """Return the last position up to `at` that does not split a span."""
    return next((span.begin for span in spans if span.begin < at < span.end), at)
