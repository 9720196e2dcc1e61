"""The shortest way to the end of a grammar, for an answer whose tokens are running out."""

from collections.abc import Callable, Collection, Sequence
from typing import Final

import numpy as np

from worker.structured.compiler import Allowed, GrammarWalk

# What ends JSON values, and then what goes on where nothing may end yet.
_STRUCTURE: Final = ("}", "]", ")", ",", '"')
# A state in which these may all come next is inside of a text.
_LETTERS: Final = ("Z", "q", "~")
# Steps of the shortest answer that are counted.
_MAX_STEPS: Final = 2000
# For what is open when time runs out, above the shortest whole answer.
_SLACK: Final = 24


class EarlyFinish:
    """Ways to finish early in one vocabulary; shared by all rows of a grammar.

    `value_ends` are texts that end a value beside JSON's, `ends` those that end more, tried in order. What `encode`
    writes with ids from `vocab_size` on, the model cannot say.
    """

    def __init__(
        self,
        encode: Callable[[str], Sequence[int]],
        vocab_size: int,
        eos_ids: Collection[int],
        value_ends: Sequence[str],
        ends: Sequence[str],
    ) -> None:
        self._eos_ids = list(eos_ids)

        def spelled(texts: Sequence[str]) -> list[tuple[int, ...]]:
            spellings = [tuple(encode(text)) for text in texts]
            return [tokens for tokens in spellings if tokens and max(tokens) < vocab_size]

        self._texts = spelled((*value_ends, '"'))
        self._marks = spelled((*ends, *value_ends, *_STRUCTURE))
        self._letters = [tokens[0] for tokens in spelled(_LETTERS) if len(tokens) == 1]

    def way(self, walk: GrammarWalk, allowed: Allowed) -> Sequence[int]:
        """Tokens to go on by; none when every allowed one is as good."""
        ends = [token for token in self._eos_ids if allowed[token]]
        if ends:
            return ends[:1]
        is_text = bool(self._letters) and all(allowed[token] for token in self._letters)
        return next((tokens for tokens in (self._texts if is_text else self._marks) if walk.fits_all(tokens)), ())

    def shortest(self, walk: GrammarWalk) -> int:
        """About how many tokens an answer needs at least; `walk` is used up."""
        steps = 0
        while steps < _MAX_STEPS:
            allowed = walk.allowed()
            way = self.way(walk, allowed) or (int(np.flatnonzero(allowed)[0]),)
            if way[0] in self._eos_ids:
                break
            walk.take(way)
            steps += len(way)
        return steps + _SLACK


class FinishingGuide:
    """One row's way to the end."""

    def __init__(self, haste: EarlyFinish) -> None:
        self._haste = haste
        self._ahead: list[int] = []

    def fork(self) -> "FinishingGuide":
        twin = FinishingGuide(self._haste)
        twin._ahead = list(self._ahead)
        return twin

    def narrow(self, walk: GrammarWalk, allowed: Allowed) -> Allowed:
        """Of the allowed tokens, the one that leads to the end, where one does."""
        if not self._ahead:
            self._ahead = list(self._haste.way(walk, allowed))
        if not self._ahead:
            return allowed
        only = np.zeros_like(allowed)
        only[self._ahead.pop(0)] = True
        return only
