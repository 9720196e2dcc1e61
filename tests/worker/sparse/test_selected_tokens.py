"""Kept tokens: which blocks of a prompt stay, and where the tokens of their slots are."""

import numpy as np
import pytest

from worker.sparse_prefill import BLOCK_TOKENS, HEAD_BLOCKS, TAIL_BLOCKS, SelectedTokens, choose, count_kept

ALWAYS = HEAD_BLOCKS + TAIL_BLOCKS


def importance(tokens: int, *blocks: int) -> np.ndarray:
    scores = np.zeros(tokens, dtype=np.float32)
    for at in blocks:
        scores[at * BLOCK_TOKENS : (at + 1) * BLOCK_TOKENS] = 1 + at / 100
    return scores


def test_the_most_important_blocks_stay_beside_the_first_and_the_last_ones() -> None:
    tokens = 20 * BLOCK_TOKENS - 5
    kept = choose(importance(tokens, 3, 4, 9), (ALWAYS + 3) / 20)
    runs = ((0, 1), (3, 5), (9, 10), (20 - TAIL_BLOCKS, 20))
    assert kept.runs == tuple((begin * BLOCK_TOKENS, min(tokens, end * BLOCK_TOKENS)) for begin, end in runs)


def test_of_equally_important_blocks_the_first_stay() -> None:
    kept = choose(np.zeros(20 * BLOCK_TOKENS, dtype=np.float32), (ALWAYS + 2) / 20)
    assert kept.runs[0] == (0, 3 * BLOCK_TOKENS)


@pytest.mark.parametrize(
    "tokens", [1, 5, BLOCK_TOKENS, 7 * BLOCK_TOKENS + 1, 40 * BLOCK_TOKENS, 40 * BLOCK_TOKENS + 77]
)
@pytest.mark.parametrize("part", [0.01, 0.25, 0.7, 1.0])
def test_how_many_tokens_stay_is_known_before_they_are_chosen(tokens: int, part: float) -> None:
    kept = choose(np.random.default_rng(tokens).random(tokens, dtype=np.float32), part)
    assert kept.count == count_kept(tokens, part) == sum(end - begin for begin, end in kept.runs)
    assert kept.runs[0][0] == 0
    assert kept.runs[-1][1] == tokens
    if part == 1.0:
        assert kept.runs == ((0, tokens),)


def test_a_slots_position_is_that_of_its_token_and_goes_on_behind_the_prompt() -> None:
    kept = SelectedTokens([(0, 3), (10, 12), (20, 25)])
    places = [slot + kept.position_offset(slot) for slot in range(13)]
    assert places == [0, 1, 2, 10, 11, 20, 21, 22, 23, 24, 25, 26, 27]


def test_runs_come_apart_with_what_was_generated_and_without_what_is_reused() -> None:
    kept, tokens = SelectedTokens([(0, 3), (10, 12), (20, 25)]), np.arange(28, dtype=np.int32)
    assert kept.segments(tokens, 0) == [[0, 1, 2], [10, 11], [20, 21, 22, 23, 24, 25, 26, 27]]
    assert kept.segments(tokens, 2)[0] == [2]
    assert kept.segments(tokens, 3)[0] == [10, 11]
