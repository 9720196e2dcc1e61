"""Lines of invented words, to train tokenizers on, the tokenizer of a model, and prompts of an exact length."""

import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from gateway.ctl.bench.closed_loop import Prompts, vocabulary


class WordEncoder(Protocol):
    """Method of the tokenizer that prompts need."""

    def encode(self, text: str, /, *, add_special_tokens: bool = ...) -> list[int]: ...


def load_tokenizer(folder: Path) -> WordEncoder:
    """Load the tokenizer of a model's folder."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def sentences(count: int, seed: int) -> Iterator[str]:
    """Yield lines of 12 words, with the word frequencies of natural text (Zipf)."""
    words = vocabulary()
    weights = [1.0 / rank for rank in range(10, len(words) + 10)]
    source = random.Random(seed)
    for _ in range(count):
        yield " ".join(source.choices(words, weights=weights, k=12)) + "."


class TokenPrompts(Prompts):
    """Prompts of an exact number of tokens."""

    def __init__(self, tokenizer: WordEncoder, seed: int) -> None:
        super().__init__(seed)
        self._tokenizer = tokenizer
        self._fillers = [word for word in self.words[:400] if len(self._encode(" " + word)) == 1]

    def make(self, tokens: int) -> str:
        chosen: list[str] = []
        length = 0
        while length < tokens:
            word = self.random.choice(self.words)
            cost = len(self._encode(" " + word if chosen else word))
            # The last words cost exactly one token each, so that the sum is exact.
            if length + cost > tokens or (chosen and tokens - length <= 4):
                word, cost = (self.random.choice(self._fillers), 1) if chosen else ("a", 1)
            chosen.append(word)
            length += cost
        return " ".join(chosen)

    def many(self, lengths: Iterable[int]) -> list[str]:
        return [self.make(length) for length in lengths]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)
