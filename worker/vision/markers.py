"""Markers of media in prompt text: those that templates write for a medium, and those that clients type."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, cast

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
