"""Requests that begin alike, and what came of them."""

import random
from collections.abc import Sequence
from typing import Final

from protocol.from_worker import Finish
from protocol.to_worker import Generate, Sampling, TokensPrompt
from tests.support.engine import Result
from tests.support.models import VOCAB

GREEDY: Final = Sampling(temperature=0.0)
# The window of the sliding models is 32 tokens, so every one of these prompts is well beyond it.
SHARED: Final = 150


def words(seed: object, count: int) -> tuple[int, ...]:
    """The same ids for the same seed."""
    rng = random.Random(str(seed))
    return tuple(rng.randrange(10, VOCAB) for _ in range(count))


def family(count: int, *, shared: int = SHARED, own: int = 5) -> list[Generate]:
    """Requests with a common beginning, and at least `own` tokens after it; every other one is sampled."""
    return [
        Generate(
            rid,
            TokensPrompt(words("shared", shared) + words(rid, own + 7 * rid)),
            Sampling(temperature=0.9, top_p=0.95, seed=rid) if rid % 2 else GREEDY,
            max_tokens=16,
        )
        for rid in range(1, count + 1)
    ]


def said(results: Sequence[Result]) -> list[tuple[list[int], str, Finish | None]]:
    """Output that must not depend on a cache."""
    return [(result.ids, result.text, result.finish) for result in results]


def cached(result: Result) -> int:
    """Tokens of the prompt that came from the cache."""
    assert result.usage is not None
    return result.usage.cached
