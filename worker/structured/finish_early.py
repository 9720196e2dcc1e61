"""Early finish: the shortest way to the end of a grammar, for an answer that is close to its token limit."""

from collections.abc import Callable, Collection, Sequence
from typing import Final

import numpy as np

from worker.structured.compiler import Allowed, GrammarWalk

# Texts that close JSON values, tried in this order. A comma or a quote continues the value where no bracket may close
# it yet.
_JSON_CLOSERS: Final = ("}", "]", ")", ",", '"')
# If all of these letters are allowed next, the grammar is inside a string.
_STRING_PROBES: Final = ("Z", "q", "~")
_MAX_COUNTED_STEPS: Final = 2000
# Number of tokens that is added to the length of the shortest complete answer, because values may be open when the
# finish begins.
_OPEN_VALUES_TOKENS: Final = 24
# Number of calls that a value may quote within each other, each of which must be ended.
_OPEN_CALLS: Final = 2


class EarlyFinish:
    """Finisher of answers in one vocabulary; shared by all rows of a grammar.

    `value_ends` are texts that end a value, in addition to JSON's; `ends` are texts that end a call or a list of calls.
    They are tried in order. Texts that `encode` writes with ids from `vocab_size` on are skipped: the model has no such
    outputs.
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

        closers = spelled(value_ends)
        self._open_calls_tokens = _OPEN_CALLS * max(map(len, closers), default=0)
        self._texts = [*closers, *spelled(('"',))]
        self._marks = spelled((*ends, *value_ends, *_JSON_CLOSERS))
        self._letters = [tokens[0] for tokens in spelled(_STRING_PROBES) if len(tokens) == 1]

    def way(self, walk: GrammarWalk, allowed: Allowed) -> Sequence[int]:
        """Return the tokens to continue with; empty if no allowed token is preferred."""
        ends = [token for token in self._eos_ids if allowed[token]]
        if ends:
            return ends[:1]
        is_text = bool(self._letters) and all(allowed[token] for token in self._letters)
        return next((tokens for tokens in (self._texts if is_text else self._marks) if walk.fits(tokens)), ())

    def shortest(self, walk: GrammarWalk) -> int:
        """Return the approximate token count of the shortest answer. Advances `walk` to the end of the answer."""
        steps = 0
        while steps < _MAX_COUNTED_STEPS:
            allowed = walk.allowed()
            way = self.way(walk, allowed) or (int(np.flatnonzero(allowed)[0]),)
            if way[0] in self._eos_ids:
                break
            walk.take(way)
            steps += len(way)
        return steps + _OPEN_VALUES_TOKENS + self._open_calls_tokens
