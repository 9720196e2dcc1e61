"""Invented words and prompts of an exact token length. Deterministic: the same seed gives the same text everywhere."""

import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, Protocol

_ONSETS: Final = (
    "b",
    "br",
    "c",
    "ch",
    "d",
    "dr",
    "f",
    "g",
    "gl",
    "h",
    "j",
    "k",
    "l",
    "m",
    "n",
    "p",
    "pl",
    "r",
    "s",
    "st",
    "t",
    "tr",
    "v",
    "w",
    "z",
)
_VOWELS: Final = ("a", "e", "i", "o", "u", "ai", "ea", "io", "ou")
_CODAS: Final = ("", "", "", "l", "n", "r", "s", "t", "nd", "st")
_WORDS: Final = 6000


class Encoder(Protocol):
    """What is used of a tokenizer."""

    def encode(self, text: str, /, *, add_special_tokens: bool = ...) -> list[int]: ...


def load_tokenizer(folder: Path) -> Encoder:
    """The tokenizer of a model's folder."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def vocabulary() -> list[str]:
    """The invented words, commonest first."""
    source = random.Random(1)
    seen: dict[str, None] = {}
    while len(seen) < _WORDS:
        syllables = source.choices((1, 2, 3), weights=(2, 5, 3))[0]
        word = "".join(
            source.choice(_ONSETS) + source.choice(_VOWELS) + source.choice(_CODAS) for _ in range(syllables)
        )
        seen[word] = None
    return list(seen)


def sentences(count: int, seed: int) -> Iterator[str]:
    """Lines of 12 words, with the word frequencies of natural text (Zipf)."""
    words = vocabulary()
    weights = [1.0 / rank for rank in range(10, len(words) + 10)]
    source = random.Random(seed)
    for _ in range(count):
        yield " ".join(source.choices(words, weights=weights, k=12)) + "."


class Prompts:
    """Prompts of an exact number of tokens that share no beginning, so that no prefix cache helps anybody."""

    def __init__(self, tokenizer: Encoder | None, seed: int) -> None:
        # As text: Python seeds with the absolute value of a number, and -1 would give the prompts of 1.
        self._random = random.Random(str(seed))
        self._words = vocabulary()
        self._tokenizer = tokenizer
        self._fillers: list[str] = []
        if tokenizer is not None:
            self._fillers = [word for word in self._words[:400] if len(self._encode(" " + word)) == 1]

    def make(self, tokens: int) -> str:
        """One prompt. Without a tokenizer a word is taken for 1.5 tokens."""
        if self._tokenizer is None:
            return " ".join(self._random.choices(self._words, k=max(1, round(tokens / 1.5))))
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
