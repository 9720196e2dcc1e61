"""Invented words and prompts of an exact token length. Deterministic: the same seed gives the same text everywhere."""

import random
from collections.abc import Iterable
from typing import Final, Protocol

_ONSETS: Final = (
    "b", "br", "c", "ch", "d", "dr", "f", "g", "gl", "h", "j", "k", "l", "m", "n", "p", "pl", "r", "s", "st", "t", "tr",
    "v", "w", "z",
)  # fmt: skip
_VOWELS: Final = ("a", "e", "i", "o", "u", "ai", "ea", "io", "ou")
_CODAS: Final = ("", "", "", "l", "n", "r", "s", "t", "nd", "st")
_WORDS: Final = 6000
# Common models' vocabularies need about this many tokens for an invented word.
TOKENS_PER_WORD: Final = 1.5


class WordEncoder(Protocol):
    """The tokenizer's method that prompts need."""

    def encode(self, text: str, /, *, add_special_tokens: bool = ...) -> list[int]: ...


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
    """Prompts of a given number of tokens, exact with a tokenizer. No two share a prefix, so no prefix cache helps."""

    def __init__(self, tokenizer: WordEncoder | None, seed: int, tokens_per_word: float = TOKENS_PER_WORD) -> None:
        # The seed is text: Python seeds with an integer's absolute value, so -1 would give the prompts of 1.
        self._random = random.Random(str(seed))
        self._words = vocabulary()
        self._tokenizer = tokenizer
        self._tokens_per_word = tokens_per_word
        self._fillers: list[str] = []
        if tokenizer is not None:
            self._fillers = [word for word in self._words[:400] if len(self._encode(" " + word)) == 1]

    def make(self, tokens: int) -> str:
        """Make one prompt. Without a tokenizer its length follows from `tokens_per_word`."""
        if self._tokenizer is None:
            return " ".join(self._random.choices(self._words, k=max(1, round(tokens / self._tokens_per_word))))
        chosen: list[str] = []
        length = 0
        while length < tokens:
            word = self._random.choice(self._words)
            cost = len(self._encode(" " + word if chosen else word))
            # The last words cost exactly one token each, so that the sum comes out even.
            if length + cost > tokens or (chosen and tokens - length <= 4):
                word, cost = (self._random.choice(self._fillers), 1) if chosen else ("a", 1)
            chosen.append(word)
            length += cost
        return " ".join(chosen)

    def many(self, lengths: Iterable[int]) -> list[str]:
        return [self.make(length) for length in lengths]

    def _encode(self, text: str) -> list[int]:
        assert self._tokenizer is not None
        return self._tokenizer.encode(text, add_special_tokens=False)
