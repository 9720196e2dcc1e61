"""Control tokens: markup that a tokenizer writes as single tokens. Spelled by ordinary tokens it is text."""

import re
from collections.abc import Mapping
from typing import Final


class Controls:
    """The tokens of one vocabulary that markup consists of. Frozen, and shared by all its parsers.

    `tokens` are their texts, and whether the tokenizer calls them special. Without any, all text is alike.
    """

    __slots__ = ("_found", "_pattern", "_tokens")

    def __init__(self, tokens: Mapping[str, bool]) -> None:
        self._tokens = dict(tokens)
        self._pattern = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)")
        self._found: dict[str, tuple[int, ...]] = {}

    def __bool__(self) -> bool:
        return bool(self._tokens)

    def offsets(self, marker: str) -> tuple[int, ...]:
        """Offsets at which tokens begin in `marker`."""
        offsets = self._found.get(marker)
        if offsets is None:
            offsets = self._found[marker] = tuple(hit.start() for hit in self._pattern.finditer(marker))
        return offsets

    def are_special(self, marker: str) -> bool:
        """Whether `marker` has such tokens and all of them are special, so that no text has them."""
        hits = self._pattern.findall(marker)
        return bool(hits) and all(self._tokens[hit] for hit in hits)


NO_CONTROLS: Final = Controls({})


def is_markup(content: str, is_special: bool) -> bool:
    """Whether a vocabulary's added token can be a piece of markup; some are indentation, or words."""
    return len(content) > 2 and not content.isspace() and (is_special or content[0] in "<[|｜◁]")
