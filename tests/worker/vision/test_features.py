"""Features stay within their budget, and what a row holds stays."""

import mlx.core as mx
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.vision.encoder import FeatureCache
from worker.vision.multimodal_merge import MediaFeatures

ROW_BYTES = 16


def features(rows: int) -> MediaFeatures:
    return MediaFeatures(mx.zeros((rows, ROW_BYTES // 4), dtype=mx.float32))


def key(number: int) -> bytes:
    return bytes([number]) * 32


def test_the_oldest_features_give_way_and_a_use_makes_them_new() -> None:
    cache = FeatureCache(3 * ROW_BYTES)
    for number in range(3):
        cache.put(key(number), features(1), set())
    assert cache.hold(7, key(0)) is not None
    cache.release(7, key(0))
    cache.put(key(3), features(1), set())
    assert [key(number) in cache for number in range(4)] == [True, False, True, True]
    assert cache.counts.feature_evictions == 1


def test_what_a_row_holds_stays_beyond_the_budget_until_it_lets_go() -> None:
    cache = FeatureCache(2 * ROW_BYTES)
    cache.put(key(0), features(4), {1, 2})
    cache.release(1, key(0))
    assert key(0) in cache
    cache.release(2, key(0))
    assert key(0) not in cache
    assert cache.nbytes == cache.held_bytes == 0


def test_layers_of_deepstack_count() -> None:
    one = MediaFeatures(mx.zeros((2, 4)), (mx.zeros((2, 4)), mx.zeros((2, 4))))
    assert one.nbytes == 3 * 2 * 4 * 4


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 8),
    st.lists(
        st.tuples(st.sampled_from(["put", "hold", "release", "resize", "clear"]), st.integers(0, 5), st.integers(0, 3)),
        max_size=40,
    ),
)
def test_bytes_are_never_above_the_budget_but_for_what_rows_hold(
    budget: int, steps: list[tuple[str, int, int]]
) -> None:
    cache = FeatureCache(budget * ROW_BYTES)
    for step, number, rid in steps:
        match step:
            case "put" if key(number) not in cache:
                cache.put(key(number), features(number + 1), {rid} if rid else set())
            case "hold":
                held = cache.hold(rid, key(number))
                assert (held is not None) == (key(number) in cache)
            case "release":
                cache.release(rid, key(number))
            case "resize":
                cache.resize(number * ROW_BYTES)
            case "clear":
                cache.clear()
            case _:
                pass
        cache.check()
