"""Processors of one request against plain Python: repetitions, windows, and tokens that may not come."""

import math
import random
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest

from protocol.to_worker import Sampling
from worker.sampling.penalties import DRY_MAX_MATCH_TOKENS, DRY_WINDOW_TOKENS, BadWords, processors

VOCAB = 16


def applied(params: Sampling, context: Sequence[int], words: BadWords | None = None, prompt: int = 0) -> list[float]:
    logits = mx.zeros((1, VOCAB)) + 1.0
    for processor in processors(params, prompt, words or BadWords(), eos_ids=(0,)):
        logits = processor(mx.array(list(context)), logits)
    values: Any = logits[0].tolist()
    return values


def repeated(context: Sequence[int], breakers: Sequence[int]) -> dict[int, int]:
    """By token: the longest end of the context that came before it already."""
    longest: dict[int, int] = {}
    for at in range(len(context) - 1):
        count = 0
        while (
            count < min(DRY_MAX_MATCH_TOKENS, at + 1)
            and context[at - count] == context[-1 - count]
            and context[-1 - count] not in breakers
        ):
            count += 1
        token = context[at + 1]
        if count and token not in breakers:
            longest[token] = max(longest.get(token, 0), count)
    return longest


@pytest.mark.parametrize("seed", range(6))
def test_dry_penalizes_what_would_go_on_with_a_repetition_by_its_length(seed: int) -> None:
    rng = random.Random(seed)
    context = [rng.randrange(1, 4 if seed % 2 else VOCAB) for _ in range(rng.choice([1, 2, 5, 40, 130]))]
    context += context[-7:]
    breakers = (3,) if seed > 2 else ()
    params = Sampling(dry_multiplier=0.8, dry_base=1.5, dry_allowed_length=2, dry_window=60 if seed == 5 else 0)
    seen = context[-60:] if seed == 5 else context
    expected = [1.0] * VOCAB
    for token, length in repeated(seen, breakers).items():
        if length >= 2:
            expected[token] -= 0.8 * 1.5 ** (length - 2)

    assert applied(params, context, BadWords(breakers=breakers)) == pytest.approx(expected, rel=1e-4)


def test_a_repetition_of_any_length_is_a_number() -> None:
    (value,) = {value for value in applied(Sampling(dry_multiplier=5.0, dry_base=4.0), [1] * 200) if value < 0}

    assert math.isfinite(value)


def test_penalties_look_back_as_far_as_their_window() -> None:
    params = Sampling(repetition_penalty=2.0, penalty_window=2)
    assert [token for token, value in enumerate(applied(params, [1, 2, 3])) if value == 0.5] == [2, 3]

    params = Sampling(frequency_penalty=0.25, penalty_window=3)
    assert applied(params, [5, 5, 5, 5, 6], prompt=1)[5:7] == [0.5, 0.75]


def test_only_allowed_ids_are_left() -> None:
    values = applied(Sampling(allowed_ids=(2, 5)), [1])

    assert [token for token, value in enumerate(values) if value > -math.inf] == [2, 5]


def test_a_sequence_is_forbidden_at_its_last_token_once_it_has_begun() -> None:
    words = BadWords(bad=((7,), (1, 2, 3)))

    assert [at for at, value in enumerate(applied(Sampling(), [1, 2], words)) if value == -math.inf] == [3, 7]
    for context in ([2], [2, 1], [1, 2, 4]):
        assert [at for at, value in enumerate(applied(Sampling(), context, words)) if value == -math.inf] == [7]


def test_the_end_is_forbidden_until_there_are_enough_tokens() -> None:
    params = Sampling(min_tokens=2, stop_ids=(9,))

    for output, ends in ((0, [0, 9]), (1, [0, 9]), (2, [])):
        context = [1, 1, 1, *([4] * output)]
        assert [at for at, value in enumerate(applied(params, context, prompt=3)) if value == -math.inf] == ends


def test_dry_looks_at_no_more_of_a_context_than_its_bound() -> None:
    far = [1, 2, 3, 4] + [5] * (DRY_WINDOW_TOKENS - 3) + [1, 2, 3]
    near = [5] * 8 + [1, 2, 3, 4] + [6] * (DRY_WINDOW_TOKENS - 8) + [1, 2, 3]
    params = Sampling(dry_multiplier=2.0, dry_allowed_length=2)
    breakers = BadWords(breakers=(5, 6))
    assert applied(params, far, breakers)[4] == 1.0, "what it would go on with is too long ago"
    assert applied(params, near, breakers)[4] < 1.0
    assert applied(Sampling(dry_multiplier=2.0, dry_allowed_length=2, dry_window=1 << 20), far, breakers)[4] == 1.0
