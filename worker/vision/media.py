"""Media of a prompt and the spans of tokens that they fill.

Positions of a prompt in time, height and width for models with multimodal rotary embeddings (MRoPE).

Markers of media in prompt text: those that templates write for a medium, and those that clients type.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt


@dataclass(slots=True, frozen=True)
class Grid:
    """Block of features, `time` × `height` × `width`; `step` is the distance in time between two layers."""

    time: int
    height: int
    width: int
    step: float = 1.0


def positions(length: int, blocks: Sequence[tuple[int, Grid]]) -> npt.NDArray[np.int32]:
    """Return positions `[3, length]`. Text has consecutive numbers on all axes, and each grid has the coordinates of
    its features.

    Text after a grid continues after the grid's largest position, as in transformers 4 and in the models' training.
    Since transformers 5.23 it continues after the larger of height and width, which differs for videos with many
    layers.
    """
    result = np.empty((3, length), dtype=np.int32)
    at = following = 0
    for begin, grid in blocks:
        end = begin + grid.time * grid.height * grid.width
        result[:, at:begin] = np.arange(following, following + begin - at)
        following += begin - at
        # transformers rounds down as well.
        times = (np.arange(grid.time) * grid.step).astype(np.int64)
        places = result[:, begin:end].reshape(3, grid.time, grid.height, grid.width)
        places[0] = following + times[:, None, None]
        places[1] = following + np.arange(grid.height)[:, None]
        places[2] = following + np.arange(grid.width)
        following += max(int(times[-1]), grid.height - 1, grid.width - 1) + 1
        at = end
    result[:, at:] = np.arange(following, following + length - at)
    return result


# U+2060, WORD JOINER, is invisible; a marker that contains it is not a token.
_JOINER: Final = "\u2060"


@dataclass(frozen=True)
class MediaMarkers:
    """Strings that mark media in a model's template, by kind of medium.

    `others` are further tokens that only an expanded medium may contain: placeholders, and the tokens around them.
    """

    by_kind: dict[str, str]
    others: tuple[str, ...] = ()

    def kinds(self, text: str) -> list[str]:
        """Return the kinds of media that a rendered text marks, in order."""
        return [kind for _, kind in self.split(text) if kind]

    def split(self, text: str) -> Iterator[tuple[str, str]]:
        """Yield the text before each marker with the marked kind, then the rest with an empty kind."""
        kinds = {marker: kind for kind, marker in self.by_kind.items()}
        at = 0
        for marker in self._marks.finditer(text):
            yield text[at : marker.start()], kinds[marker[0]]
            at = marker.end()
        yield text[at:], ""

    def broken(self, value: Any) -> Any:
        """Return a copy of a JSON value with a word joiner inserted into each marker, so that a client's text is never
        taken for a marker."""
        match value:
            case str():
                return self._any.sub(_break, value)
            case dict():
                members = cast("dict[str, Any]", value)
                return {self._any.sub(_break, key): self.broken(member) for key, member in members.items()}
            case list() | tuple():
                return [self.broken(member) for member in cast("list[Any]", value)]
            case _:
                return value

    @cached_property
    def _marks(self) -> re.Pattern[str]:
        return _one_of(self.by_kind.values())

    @cached_property
    def _any(self) -> re.Pattern[str]:
        return _one_of((*self.by_kind.values(), *self.others))


def _one_of(strings: Any) -> re.Pattern[str]:
    ordered = sorted({string for string in strings if string}, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")


def _break(marker: re.Match[str]) -> str:
    return f"{marker[0][0]}{_JOINER}{marker[0][1:]}"


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
