"""Invented words, and prompts made of them. Deterministic: the same seed gives the same text everywhere."""

import random
from typing import Final

_ONSETS: Final = (
    "b", "br", "c", "ch", "d", "dr", "f", "g", "gl", "h", "j", "k", "l", "m", "n", "p", "pl", "r", "s", "st", "t", "tr",
    "v", "w", "z",
)  # fmt: skip
_VOWELS: Final = ("a", "e", "i", "o", "u", "ai", "ea", "io", "ou")
_CODAS: Final = ("", "", "", "l", "n", "r", "s", "t", "nd", "st")
_WORDS: Final = 6000
# Approximate number of tokens that a common model's vocabulary needs for one invented word.
TOKENS_PER_WORD: Final = 1.5


def vocabulary() -> list[str]:
    """Generate the invented words, commonest first."""
    source = random.Random(1)
    seen: dict[str, None] = {}
    while len(seen) < _WORDS:
        syllables = source.choices((1, 2, 3), weights=(2, 5, 3))[0]
        word = "".join(
            source.choice(_ONSETS) + source.choice(_VOWELS) + source.choice(_CODAS) for _ in range(syllables)
        )
        seen[word] = None
    return list(seen)


class Prompts:
    """Makes prompts of about a given number of tokens. No two prompts share a prefix, so no prefix cache helps."""

    def __init__(self, seed: int, tokens_per_word: float = TOKENS_PER_WORD) -> None:
        # The seed is text: Python seeds with an integer's absolute value, so -1 would give the prompts of 1.
        self.random = random.Random(str(seed))
        self.words = vocabulary()
        self._tokens_per_word = tokens_per_word

    def make(self, tokens: int) -> str:
        """Make one prompt of about `tokens` tokens, using `tokens_per_word`."""
        return " ".join(self.random.choices(self.words, k=max(1, round(tokens / self._tokens_per_word))))
