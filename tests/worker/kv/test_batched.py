"""Rows of a batch's caches are, whatever happens to the batch, what caches of their own would be."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache, RotatingKVCache

from tests.support.caches import KINDS, contents, filled
from tests.support.scale import scaled
from worker.kv import batched, ragged

WINDOW = 8
TOKENS = list(range(40, 60))


def fed(caches: list[Any], values: np.ndarray) -> None:
    """`[rows, count]` values into every cache, as a model would."""
    rows, count = values.shape
    keys = mx.broadcast_to(mx.array(values)[:, None, :, None], (rows, 2, count, 3))
    for cache in caches:
        cache.update_and_fetch(keys, -keys)


def seen(cache: Any, rows: int, count: int) -> list[list[list[float]]]:
    """Of each row, the values that each token of a forward pass of `count` tokens sees; its own are 0."""
    mask = cache.make_mask(count)
    keys, _ = cache.update_and_fetch(mx.zeros((rows, 2, count, 3)), mx.zeros((rows, 2, count, 3)))
    slots = keys.shape[2]
    if mask is None:
        mask = mx.ones((1, 1, 1, slots))
    elif isinstance(mask, str):
        mask = mx.arange(slots) <= (mx.arange(count) + slots - count)[:, None]
    table = np.array(mx.broadcast_to(mask, (rows, 1, count, slots)))[:, 0]
    held = np.array(keys[:, 0, :, 0])
    return [[sorted(held[row][query > 0].tolist()) for query in table[row]] for row in range(rows)]


class Twin:
    """A batch of plain and windowed KV, and the same rows each in caches of its own."""

    def __init__(self) -> None:
        self.batch: list[Any] = []
        self.rows: list[list[float]] = []
        self._value = 0.0

    def join(self, lengths: list[int]) -> None:
        alone: list[list[Any]] = []
        for length in lengths:
            caches = [KVCache(), KVCache(), RotatingKVCache(WINDOW)]
            values = [self._next() for _ in range(length)]
            if values:
                fed(caches, np.array([values], dtype=np.float32))
            alone.append(caches)
            self.rows.append(values)
        merged = batched.merge(alone)
        if self.batch:
            batched.extend(self.batch, merged)
        else:
            self.batch = merged

    def block(self, counts: list[int], given_back: list[int]) -> None:
        """Each row brings its tokens, then gives back some of them."""
        counts = [max(1, count) for count, _ in zip(counts, self.rows, strict=False)]
        width = ragged.wide(max(counts))
        # A window has its last block's tokens to give back, all but one.
        drop = [width - count + min(back, count - 1) for count, back in zip(counts, given_back, strict=False)]
        table = np.array([[self._next() for _ in range(width)] for _ in counts], dtype=np.float32)
        batched.begin_block(self.batch, counts, width)
        fed(self.batch, table)
        batched.end_block(self.batch, counts, width)
        batched.rewind(self.batch, drop)
        for row, values, less in zip(self.rows, table.tolist(), drop, strict=True):
            row.extend(values[: width - less])

    def keep(self, rows: list[int]) -> None:
        batched.keep(self.batch, rows)
        self.rows = [self.rows[at] for at in rows]

    def check(self) -> None:
        for at, row in enumerate(self.rows):
            plain, _, window = batched.extract(self.batch, at)
            assert plain.offset == window.offset == len(row)
            assert plain.keys[0, 0, :, 0].tolist() == row
            assert plain.values[0, 1, :, 2].tolist() == [-value for value in row]
            held = window.keys[0, 0, :, 0].tolist()
            assert held == row[len(row) - len(held) :]
            assert len(held) >= min(len(row), WINDOW - 1)
        assert self.batch[0].offset.tolist() == [len(row) for row in self.rows]
        assert self.batch[0].lengths is self.batch[1].lengths, "layers that change alike share their arrays"

    def _next(self) -> float:
        self._value += 1.0
        return self._value


counts = st.lists(st.integers(1, 6), min_size=8, max_size=8)
steps = st.one_of(
    st.tuples(st.just("join"), st.lists(st.integers(0, 20), min_size=1, max_size=3)),
    st.tuples(st.just("step"), st.integers(1, 10)),
    st.tuples(st.just("block"), st.tuples(counts, counts)),
    st.tuples(st.just("keep"), st.integers(1, 255)),
)


@settings(max_examples=scaled(300, 25), deadline=None)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=3), st.lists(steps, max_size=8), st.booleans())
def test_rows_stay_what_they_are_alone_through_steps_blocks_joins_and_leaves(
    first: list[int], plan: list[Any], sees_room: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ragged, "sees_room", sees_room)
        run_plan(first, plan)


def run_plan(first: list[int], plan: list[Any]) -> None:
    twin = Twin()
    twin.join(first)
    twin.block([1] * 8, [0] * 8)
    for what, value in plan:
        if what == "join" and len(twin.rows) < 6:
            twin.join(value)
            twin.block([1] * 8, [0] * 8)
        elif what == "step":
            for _ in range(value):
                twin.block([1] * 8, [0] * 8)
        elif what == "block":
            twin.block(*value)
        elif what == "keep":
            rows = [at for at in range(len(twin.rows)) if value >> at & 1]
            twin.keep(rows or [0])
        twin.check()


@pytest.mark.parametrize("sees_room", [False, True])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("lengths", [[5], [5, 5], [5, 2], [20], [20, 20], [20, 3], [12, 20]])
def test_each_token_sees_what_it_would_alone(
    lengths: list[int], count: int, sees_room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ragged, "sees_room", sees_room)
    twin = Twin()
    twin.join(lengths)
    # The window has rotated, and some rows have given tokens back.
    twin.block([1] * 8, [0] * 8)
    twin.block([4] * 8, [2, 1, 0] * 3)
    twin.block([1] * 8, [0] * 8)
    batched.begin_block(twin.batch, [count] * len(lengths), count)
    plain, _, window = twin.batch
    expected = [[[*row, *[0.0] * (query + 1)] for query in range(count)] for row in twin.rows]
    assert seen(plain, len(lengths), count) == [[sorted(each) for each in row] for row in expected]
    assert seen(window, len(lengths), count) == [[sorted(each[-WINDOW:]) for each in row] for row in expected]


@pytest.mark.parametrize(("lengths", "step", "block"), [([300], None, "causal"), ([7, 7, 7], None, "causal")])
def test_rows_of_equal_length_need_no_mask(lengths: list[int], step: None, block: str) -> None:
    twin = Twin()
    twin.join(lengths)
    assert twin.batch[0].make_mask(1) is step
    assert twin.batch[0].make_mask(5) == block
    assert twin.batch[0].make_mask(1, window_size=4) is not None, "a window shorter than the rows hides tokens"
    assert twin.batch[2].make_mask(1) is None
    twin.join([3])
    assert isinstance(twin.batch[0].make_mask(1), mx.array)
    twin.keep(list(range(len(lengths))))
    assert twin.batch[0].make_mask(1) is step


def test_attention_over_all_of_the_room_has_the_same_shape_for_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that kernels which are built for one shape are built once."""
    monkeypatch.setattr(ragged, "sees_room", True)
    twin = Twin()
    twin.join([5, 9])
    for count in (1, 4):
        mask = twin.batch[0].make_mask(count)
        assert isinstance(mask, mx.array)
        assert mask.shape == (2, 1, count, ragged.STEP)
        twin.block([count] * 8, [0] * 8)
    twin.keep([1])
    assert twin.batch[0].make_mask(1) is None
    assert isinstance(twin.batch[0].make_mask(4), mx.array)
    assert [ragged.wide(count) for count in (1, 2, 3, 8, 69)] == [1, 2, 4, 8, 128]


def test_room_grows_by_a_quarter_at_once_where_shapes_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [ragged.room(tokens) for tokens in (1, 257, 5000)] == [256, 512, 5120]
    monkeypatch.setattr(ragged, "sees_room", True)
    sizes = sorted({ragged.room(tokens) for tokens in range(1, 16385)})
    assert sizes[:4] == [256, 512, 768, 1024]
    assert len(sizes) == 20
    assert all(tokens <= ragged.room(tokens) <= max(256, 1.25 * tokens + 256) for tokens in range(1, 16385))


@pytest.mark.parametrize("kind", ["plain", "sliding", "recurrent", "lists"])
def test_one_row_of_a_batch_is_what_the_row_was(kind: str) -> None:
    rows = [filled(kind, TOKENS[:5]), filled(kind, TOKENS)]
    caches = batched.merge(rows)
    for at, row in enumerate(rows):
        assert contents(batched.extract(caches, at)) == contents(row)
        assert [type(cache) for cache in batched.extract(caches, at)] == [type(cache) for cache in KINDS[kind]()]


def test_recurrent_layers_of_some_rows_go_back_to_where_a_block_began() -> None:
    rows = [filled("recurrent", TOKENS[:5]), filled("recurrent", TOKENS)]
    caches = batched.merge(rows)
    before = batched.states(caches)
    for leaf in (caches[0], caches[2]):
        leaf.cache = [array + 1 for array in leaf.cache]
    batched.restore(caches, before, [True, False])
    assert contents(batched.extract(caches, 0)) == contents(rows[0])
    assert contents(batched.extract(caches, 1))[0] == [(array + 1).tolist() for array in rows[1][0].cache]


def test_a_row_that_leaves_or_joins_is_copied_alone() -> None:
    length, dim, row_bytes = 250, 128, 2 * 4 * 8 * 256 * 128

    def alone(seed: int) -> list[Any]:
        cache = KVCache()
        keys = mx.random.normal((1, 8, length, dim), key=mx.random.key(seed))
        cache.update_and_fetch(keys, -keys)
        return [cache]

    batch = batched.merge([alone(seed) for seed in range(16)])
    order = batched.without(16, [3, 15])
    assert order == [0, 1, 2, 14, *range(4, 14)]
    mx.eval([cache.state for cache in batch])
    joining = batched.merge([alone(seed) for seed in (20, 21)])
    mx.eval([cache.state for cache in joining])
    mx.synchronize()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    batched.keep(batch, order)
    batched.extend(batch, joining)
    mx.eval([cache.state for cache in batch])
    mx.synchronize()
    assert mx.get_peak_memory() - before < 4 * row_bytes
    for at, seed in enumerate([*order, 20, 21]):
        (row,) = batched.extract(batch, at)
        assert mx.array_equal(row.keys, alone(seed)[0].keys[..., :length, :])
        assert mx.array_equal(row.values, alone(seed)[0].values[..., :length, :])


def test_rows_that_have_left_stay_allocated_until_half_is_free_or_memory_is_wanted() -> None:
    alone = [KVCache() for _ in range(8)]
    for cache in alone:
        cache.update_and_fetch(mx.zeros((1, 2, 10, 64)), mx.zeros((1, 2, 10, 64)))
    batch = batched.merge([[cache] for cache in alone])
    row_bytes = batch[0].nbytes // 8
    batched.keep(batch, batched.without(8, [0, 5]))
    assert batch[0].nbytes == 8 * row_bytes
    batched.compact(batch)
    assert batch[0].nbytes == 6 * row_bytes
    batched.keep(batch, batched.without(6, [1, 2, 3]))
    assert batch[0].nbytes == 3 * row_bytes
