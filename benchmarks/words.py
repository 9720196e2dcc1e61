"""Lines of invented words, to train tokenizers on, and the tokenizer of a model."""

import random
from collections.abc import Iterator
from pathlib import Path

from gateway.ctl.bench.words import WordEncoder, vocabulary


def load_tokenizer(folder: Path) -> WordEncoder:
    """The tokenizer of a model's folder."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def sentences(count: int, seed: int) -> Iterator[str]:
    """Lines of 12 words, with the word frequencies of natural text (Zipf)."""
    words = vocabulary()
    weights = [1.0 / rank for rank in range(10, len(words) + 10)]
    source = random.Random(seed)
    for _ in range(count):
        yield " ".join(source.choices(words, weights=weights, k=12)) + "."
