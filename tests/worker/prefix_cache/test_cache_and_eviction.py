"""The prefix cache against a model of it that a dictionary can be."""

import gc
import random
import time
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.caches import KINDS, contents, filled, layout
from tests.support.prefix_checks import check_cache
from tests.support.scale import patient, scaled
from worker.prefix_cache.cache_and_eviction import PrefixCache
from worker.prefix_cache.radix_tree import Tokens, common_prefix

PLENTY = 1 << 30
SALTS = ("", "a", "b")


def ids(tokens: Sequence[int]) -> Tokens:
    return np.array(tokens, dtype=np.int32)


def store(cache: PrefixCache, kind: str, tokens: Sequence[int], salt: str = "") -> None:
    cache.store(ids(tokens), filled(kind, tokens), salt)


def fetch(cache: PrefixCache, kind: str, tokens: Sequence[int], salt: str = "") -> int:
    """Fetch a prefix and return its tokens' number, after checking that its KV is exactly that of these tokens."""
    reused, caches = cache.fetch(ids(tokens), salt)
    assert reused <= len(tokens)
    if reused:
        assert contents(caches) == contents(filled(kind, tokens[:reused]))
    else:
        assert caches == []
    return reused


def common(left: Sequence[int], right: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=24)
# Few tokens and few salts, so that prefixes are shared, edges split, and tenants tempted to meet.
steps = st.lists(st.tuples(st.sampled_from(["store", "fetch"]), st.sampled_from(SALTS), prompts), max_size=40)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=scaled(40, 16), deadline=None)
@given(steps=steps)
def test_a_cache_with_room_finds_exactly_what_was_stored(kind: str, steps: list[tuple[str, str, list[int]]]) -> None:
    cache = PrefixCache(layout(kind), PLENTY)
    known: dict[str, list[list[int]]] = {salt: [] for salt in SALTS}
    for action, salt, tokens in steps:
        if action == "store":
            store(cache, kind, tokens, salt)
            known[salt].append(tokens)
        else:
            shared = [common(other, tokens) for other in known[salt]]
            if cache.needs_checkpoints:
                shared = [size for size, other in zip(shared, known[salt], strict=True) if size == len(other)]
            expected = max(shared, default=0)
            assert cache.longest(ids(tokens), salt) == expected
            assert fetch(cache, kind, tokens, salt) == expected
        check_cache(cache)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=scaled(40, 16), deadline=None)
@given(steps=steps, nodes=st.integers(0, 6), max_arrays=st.integers(4, 30))
def test_a_small_cache_stays_within_its_budget_and_never_returns_anything_wrong(
    kind: str, steps: list[tuple[str, str, list[int]]], nodes: int, max_arrays: int
) -> None:
    scale = PrefixCache(layout(kind), PLENTY)
    store(scale, kind, [0] * 12)
    cache = PrefixCache(layout(kind), nodes * scale.nbytes, max_arrays)
    for action, salt, tokens in steps:
        if action == "store":
            store(cache, kind, tokens, salt)
        else:
            fetch(cache, kind, tokens, salt)
        check_cache(cache)
    cache.clear()
    check_cache(cache)
    assert (cache.nbytes, cache.arrays, len(cache)) == (0, 0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_known_prefix_costs_nothing_again(kind: str) -> None:
    cache = PrefixCache(layout(kind), PLENTY)
    store(cache, kind, range(20))
    before = cache.nbytes, len(cache)
    store(cache, kind, range(20))
    assert (cache.nbytes, len(cache)) == before


def test_shared_tokens_are_held_once() -> None:
    cache = PrefixCache(layout("plain"), PLENTY)
    store(cache, "plain", [*range(500), 1])
    once = cache.nbytes
    for tail in range(600, 620):
        store(cache, "plain", [*range(500), tail])
    assert cache.nbytes < once * 1.1
    check_cache(cache)


def test_a_hit_keeps_an_entry_that_would_have_been_the_oldest() -> None:
    cache = PrefixCache(layout("plain"), PLENTY)
    store(cache, "plain", [1] * 10)
    one = cache.nbytes
    cache = PrefixCache(layout("plain"), one * 3)
    for token in (1, 2, 3):
        store(cache, "plain", [token] * 10)
    assert fetch(cache, "plain", [1] * 10) == 10
    store(cache, "plain", [4] * 10)
    assert [fetch(cache, "plain", [token] * 10) for token in (1, 2, 3, 4)] == [10, 0, 10, 10]
    assert cache.counts.prefix_evictions == 1


def test_a_long_conversation_loses_its_newest_part_before_its_beginning() -> None:
    cache = PrefixCache(layout("plain"), PLENTY)
    store(cache, "plain", range(100))
    half = PrefixCache(layout("plain"), cache.nbytes)
    for end in (25, 50, 75, 100):
        store(half, "plain", range(end))
    store(half, "plain", [7] * 40)
    check_cache(half)
    assert fetch(half, "plain", range(100)) == 50


def test_a_prefix_larger_than_the_budget_leaves_what_fits_and_does_not_evict_for_nothing() -> None:
    scale = PrefixCache(layout("plain"), PLENTY)
    store(scale, "plain", [5] * 200)
    cache = PrefixCache(layout("plain"), scale.nbytes)
    store(cache, "plain", [9, 9, 9])
    store(cache, "plain", range(1000))
    check_cache(cache)
    assert 190 <= fetch(cache, "plain", range(1000)) <= 200

    hybrid = PrefixCache(layout("recurrent"), 3000)
    store(hybrid, "recurrent", [9, 9, 9])
    store(hybrid, "recurrent", range(1000))
    check_cache(hybrid)
    assert fetch(hybrid, "recurrent", range(1000)) == 0
    assert fetch(hybrid, "recurrent", [9, 9, 9]) == 3, "what could not be kept must not push out what was"


def test_arrays_are_capped_next_to_bytes() -> None:
    cache = PrefixCache(layout("plain"), PLENTY, max_arrays=40)
    for token in range(100):
        store(cache, "plain", [token, token])
        check_cache(cache)
    assert cache.arrays == 40
    assert fetch(cache, "plain", [99, 99]) == 2


def test_prefixes_make_room_for_the_arrays_of_running_rows() -> None:
    cache = PrefixCache(layout("plain"), PLENTY, max_arrays=40)
    for token in range(10):
        store(cache, "plain", [token, token])
    each = cache.arrays // len(cache)
    before = len(cache)
    cache.arrays_per_row = each
    cache.make_room_for(3)
    check_cache(cache)
    assert cache.arrays + 3 * each <= 40
    assert len(cache) == min(before, 40 // each - 3)
    assert fetch(cache, "plain", [9, 9]) == 2, "the newest stays"

    cache.make_room_for(1000)
    assert len(cache) == 0
    store(cache, "plain", [1, 1])
    assert len(cache) == 0, "rows alone have all arrays"

    cache.make_room_for(0)
    for token in range(20):
        store(cache, "plain", [token, token])
    assert cache.arrays == 40


def test_an_evicted_checkpoint_takes_along_the_edges_that_only_led_to_it() -> None:
    cache = PrefixCache(layout("recurrent"), PLENTY)
    store(cache, "recurrent", [*range(10), 77])
    store(cache, "recurrent", [*range(10), 88])
    assert len(cache) == 3, "a fork without a checkpoint, and two ends"
    small = PrefixCache(layout("recurrent"), cache.nbytes)
    store(small, "recurrent", [*range(10), 77])
    store(small, "recurrent", [*range(10), 88])
    store(small, "recurrent", [5] * 10)
    check_cache(small)
    assert fetch(small, "recurrent", [5] * 10) == 10
    assert len(small) == 1


def test_a_checkpoint_in_the_middle_of_an_edge_can_be_added_later() -> None:
    cache = PrefixCache(layout("sliding"), PLENTY)
    store(cache, "sliding", range(30))
    assert fetch(cache, "sliding", [*range(20), 99]) == 0
    store(cache, "sliding", range(20))
    assert fetch(cache, "sliding", [*range(20), 99]) == 20
    assert fetch(cache, "sliding", range(30)) == 30
    check_cache(cache)


def test_nothing_is_kept_when_the_budget_is_zero() -> None:
    cache = PrefixCache(layout("plain"), 0)
    store(cache, "plain", range(10))
    check_cache(cache)
    assert len(cache) == 0
    assert not cache.is_on


def test_counts_say_what_happened() -> None:
    cache = PrefixCache(layout("plain"), PLENTY)
    store(cache, "plain", range(10))
    fetch(cache, "plain", [*range(6), 50])
    fetch(cache, "plain", [60])
    counts = cache.counts
    assert (counts.prefix_queries, counts.prefix_hits) == (2, 1)
    assert (counts.prefix_query_tokens, counts.prefix_hit_tokens) == (8, 6)


def test_a_look_up_is_linear_in_the_prompt() -> None:
    """100k tokens that diverge half way, in a path of 200 nodes: anything quadratic would take minutes."""
    rng = random.Random(0)
    prompt = [rng.randrange(1000) for _ in range(100_000)]
    cache = PrefixCache(layout("plain"), PLENTY)
    whole = filled("plain", prompt)
    for end in range(500, len(prompt) + 1, 500):
        cache.store(ids(prompt[:end]), whole)
    diverging = ids([*prompt[:50_050], *(5000 + token for token in prompt[50_050:])])
    started = time.monotonic()
    assert cache.longest(diverging) == 50_050
    assert time.monotonic() - started < patient(5)


@given(left=prompts, right=prompts)
def test_common_prefix_is_the_obvious_one(left: list[int], right: list[int]) -> None:
    assert common_prefix(ids(left), ids(right)) == common(left, right)


@pytest.mark.parametrize("kind", scaled(KINDS, ["plain", "sliding", "recurrent"]))
def test_the_books_say_what_mlx_really_holds(kind: str) -> None:
    cache = PrefixCache(layout(kind), 600_000)
    gc.collect()
    before = mx.get_active_memory()
    rng = random.Random(1)
    for _ in range(60):
        tokens = [rng.randrange(2) for _ in range(5)] + [rng.randrange(9)] * rng.randrange(100, 400)
        store(cache, kind, tokens)
        fetch(cache, kind, tokens[: rng.randrange(len(tokens))])
    assert len(cache) > 10
    mx.synchronize()
    gc.collect()
    held = mx.get_active_memory() - before
    # MLX may use a free buffer that is larger than asked for; one that a view keeps alive would be many times that.
    assert held <= cache.nbytes * 1.5
    cache.clear()
    gc.collect()
    assert mx.get_active_memory() - before <= 20_000


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [[1, 2, 3, 4, 5], [1, 2, 9, 9]])
def test_a_store_that_finds_no_memory_leaves_a_cache_that_can_be_cleared(
    tokens: list[int], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise RuntimeError("[malloc] Unable to allocate 1073741824 bytes.")

    cache = PrefixCache(layout(kind), PLENTY)
    store(cache, kind, [1, 2, 3])
    store(cache, kind, [1, 2, 3, 7])
    with monkeypatch.context() as patch:
        patch.setattr(mx, "async_eval", failing)
        with pytest.raises(RuntimeError, match="Unable to allocate"):
            store(cache, kind, tokens)
    cache.clear()
    check_cache(cache)
    assert (len(cache), cache.nbytes, cache.arrays) == (0, 0, 0)
    store(cache, kind, tokens)
    assert fetch(cache, kind, tokens) == len(tokens)
    check_cache(cache)
