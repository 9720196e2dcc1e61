"""Control tokens: markup that a tokenizer encodes as single tokens. The same spelling in ordinary tokens is text."""

import re
from collections.abc import Mapping
from typing import Final


class Controls:
    """Control tokens of one vocabulary that occur in markup. Frozen, and shared by all parsers of the model.

    `tokens` maps their texts to whether the tokenizer marks them as special. If it is empty, parsers go by the text
    only.
    """

    __slots__ = ("_found", "_pattern", "_tokens")

    def __init__(self, tokens: Mapping[str, bool]) -> None:
        self._tokens = dict(tokens)
        self._pattern = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)")
        self._found: dict[str, tuple[int, ...]] = {}

    def __bool__(self) -> bool:
        return bool(self._tokens)

    def offsets(self, marker: str) -> tuple[int, ...]:
        """Return the offsets at which control tokens begin in `marker`."""
        offsets = self._found.get(marker)
        if offsets is None:
            offsets = self._found[marker] = tuple(hit.start() for hit in self._pattern.finditer(marker))
        return offsets

    def are_special(self, marker: str) -> bool:
        """Return whether `marker` contains control tokens and all of them are special, so that the marker cannot be
        text.
        """
        hits = self._pattern.findall(marker)
        return bool(hits) and all(self._tokens[hit] for hit in hits)


NO_CONTROLS: Final = Controls({})


def is_markup(content: str, is_special: bool) -> bool:
    """Return whether an added token of a vocabulary can be a part of markup; some added tokens are indentation or
    words.
    """
    return len(content) > 2 and not content.isspace() and (is_special or content[0] in "<[|｜◁]")
