"""Drafts are what followed the longest match of a row's newest tokens."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.speculation.text_sources import (
    HISTORY_SALTS,
    HISTORY_TOKENS,
    MAX_MATCH_TOKENS,
    DraftSource,
    IndexedTokens,
    Lookup,
    OutputHistory,
)

NOTHING = IndexedTokens(np.empty(0, dtype=np.int32))


def lookup(tokens: list[int], prediction: tuple[int, ...] = ()) -> Lookup:
    return Lookup(np.array(tokens, dtype=np.int32), prediction)


def drafted(row: Lookup, most: int = 16, history: IndexedTokens = NOTHING) -> list[int]:
    guess = row.guess(most, history)
    return guess.tokens if guess is not None else []


@pytest.mark.parametrize(
    ("tokens", "draft"),
    [
        ([1, 2, 3, 4, 5, 6, 9, 1, 2, 3], [4, 5, 6]),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5], [6, 7, 8, 9, 1]),
        ([1, 2, 3, 7, 5, 1, 2, 3, 8, 6, 1, 2, 3], [8, 6, 1]),  # the newest of two that match as long
        ([9, 1, 2, 3, 8, 0, 1, 2, 3, 7, 9, 1, 2, 3], [8, 0, 1, 2]),  # the longest
        ([5, 6, 5, 6, 5, 6, 5], [6, 5, 6, 5, 6]),  # a copy that runs into itself
        ([1, 2, 3, 4, 5, 6, 7], []),
        ([1, 2, 9, 1, 2], []),
        ([1, 2], []),
    ],
)
def test_a_draft_is_what_followed_the_longest_match(tokens: list[int], draft: list[int]) -> None:
    assert drafted(lookup(tokens)) == draft


@pytest.mark.parametrize(("prediction", "draft"), [((1, 2, 3, 4, -1, 6, 7), [4]), ((1, 2, 3, -1, 5, 6), [])])
def test_a_draft_ends_before_what_may_not_be_drafted(prediction: tuple[int, ...], draft: list[int]) -> None:
    assert drafted(lookup([8, 1, 2, 3], prediction)) == draft


def test_a_draft_is_no_longer_than_asked_for_or_than_its_match() -> None:
    text = list(range(40))
    assert drafted(lookup([*text, 100, *text[:20]])) == text[20:36]
    assert drafted(lookup([*text, 100, *text[:20]]), most=2) == [20, 21]
    assert drafted(lookup([*text, 100, *text[:4]])) == [4, 5, 6, 7]


def test_text_that_was_added_is_found_and_a_token_taken_back_is_not() -> None:
    row = lookup([1, 2, 3, 4])
    row.extend([9, 1, 2])
    row.extend([3])
    assert drafted(row) == [4, 9, 1, 2][:3]
    row.shorten()
    assert drafted(row) == []
    assert row.text.tolist() == [1, 2, 3, 4, 9, 1, 2]


def test_a_prediction_is_looked_up_and_never_a_part_of_the_text() -> None:
    row = lookup([7, 8, 20, 21, 22], prediction=(20, 21, 22, 23, 24))
    guess = row.guess(8, NOTHING)
    assert guess is not None
    assert (guess.tokens, guess.source) == ([23, 24], DraftSource.PREDICTION), "not beyond its end"
    assert row.text.tolist() == [7, 8, 20, 21, 22]


@pytest.mark.parametrize(
    ("prompt", "source", "draft"),
    [
        ([7, 20, 21, 22, 23, 24, 9], DraftSource.PREDICTION, [30, 31, 32]),  # as long in both
        ([7, 19, 20, 21, 22, 23, 24, 9, 19], DraftSource.LOOKUP, [23, 24, 9, 19]),  # longer in the prompt
    ],
)
def test_a_prediction_goes_before_a_prompt_that_matches_no_longer(
    prompt: list[int], source: DraftSource, draft: list[int]
) -> None:
    guess = lookup([*prompt, 20, 21, 22], prediction=(5, 20, 21, 22, 30, 31, 32, 33)).guess(8, NOTHING)

    assert guess is not None
    assert (guess.source, guess.tokens) == (source, draft)


def test_outputs_before_are_found_by_rows_of_their_salt_alone() -> None:
    history = OutputHistory()
    history.add("ours", np.array([1, 2, 3, 4, 5, 6], dtype=np.int32), 4)
    row = lookup([9, 9, 1, 2, 3])
    guess = row.guess(8, history.of("ours"))
    assert guess is not None
    assert (guess.tokens, guess.source) == ([4, 5, 6], DraftSource.HISTORY)
    assert drafted(row, history=history.of("theirs")) == []


def test_history_is_bounded_in_tokens_and_salts() -> None:
    history = OutputHistory()
    for salt in range(HISTORY_SALTS + 3):
        history.add(str(salt), np.arange(100, dtype=np.int32), 50)
    assert len(history.of("0")) == 0
    assert len(history.of(str(HISTORY_SALTS + 2))) == 59
    for _ in range(50):
        history.add("long", np.arange(2000, dtype=np.int32), 1500)
    assert HISTORY_TOKENS // 2 < len(history.of("long")) <= HISTORY_TOKENS


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(0, 20))
def test_any_draft_follows_a_match_of_its_length_at_least(tokens: list[int], most: int) -> None:
    guess = lookup(tokens).guess(most, NOTHING)
    if guess is None:
        return
    assert 0 < len(guess.tokens) <= min(most, guess.match)
    tail = tokens[-guess.match :]
    begins = [at for at in range(len(tokens) - guess.match) if tokens[at : at + guess.match] == tail]
    assert any(
        all(token == (tokens[at + guess.match :] * 60)[step] for step, token in enumerate(guess.tokens))
        for at in begins
    )


def longest(tokens: list[int]) -> tuple[int, int]:
    """As `IndexedTokens.longest`, by looking everywhere."""
    tail = tokens[-MAX_MATCH_TOKENS:]
    best, place = 0, -1
    for at in range(len(tokens) - 2, 1, -1):
        length = 0
        while length < min(len(tail), at + 1) and tokens[at - length] == tail[-1 - length]:
            length += 1
        if length >= 3 and length > best:
            best, place = length, at
    return place, best


@given(
    st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=40), min_size=1, max_size=8),
    st.lists(st.booleans(), min_size=8, max_size=8),
)
def test_the_index_of_a_text_that_grows_finds_what_a_search_of_all_of_it_finds(
    parts: list[list[int]], searches: list[bool]
) -> None:
    """The newest sixteen places are compared, so texts are short; a token is taken back now and then."""
    text, known = IndexedTokens(np.array(parts[0], dtype=np.int32)), list(parts[0])
    for part, searches_now in zip(parts, searches, strict=False):
        text.extend(part)
        known += part
        if searches_now:
            text.longest(text.tokens)
        text.shorten()
        known.pop()
    place, match = text.longest(text.tokens)
    expected = longest(known)
    assert match <= expected[1]
    if sum(known[at - 2 : at + 1] == known[-3:] for at in range(2, len(known) - 1)) <= 16:
        assert (place, match) == expected


def test_a_long_text_is_indexed_in_pieces_and_grows_beyond_its_room() -> None:
    rng = np.random.default_rng(3)
    text = IndexedTokens(rng.integers(0, 50_000, 20_000, dtype=np.int32))
    wanted = text.tokens[15_000:15_010].copy()
    for _ in range(3):
        text.extend(rng.integers(0, 50_000, 9_000, dtype=np.int32).tolist())
        text.extend(wanted.tolist())
        places = [text.longest(text.tokens)[0] for _ in range(12)]
        assert places[-1] in (15_009, len(text) - 1 - 9_010)
        assert text.longest(text.tokens)[1] == 10


def test_a_long_text_is_made_known_piece_by_piece_and_then_found_as_a_whole() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(10, 1000, 40_000).tolist()
    row = lookup([*tokens, *tokens[20_000:20_008]])
    pieces = 1
    while not row.index(4096):
        pieces += 1
    assert pieces == -(-len(row.text) // 4096)
    assert drafted(row) == tokens[20_008:20_016]


def test_the_history_of_all_salts_takes_tens_of_megabytes() -> None:
    history, rng = OutputHistory(), np.random.default_rng(0)
    tracemalloc.start()
    try:
        for salt in range(HISTORY_SALTS + 5):
            for _ in range(3):
                history.add(str(salt), rng.integers(0, 50_000, HISTORY_TOKENS // 2).astype(np.int32), HISTORY_TOKENS)
            history.of(str(salt)).longest(np.array([1, 2, 3, 4], dtype=np.int32))
        assert tracemalloc.get_traced_memory()[0] < 64 << 20
    finally:
        tracemalloc.stop()
