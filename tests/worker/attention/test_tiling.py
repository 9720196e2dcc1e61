"""The tiling of the attention kernels gives attention, whatever a row's length, window, sinks and neighbours."""

import mlx.core as mx
import numpy as np
import pytest

from tests.support.tiled_attention import plain, tiled
from tests.worker.attention.cases import deviation, rows
from worker.attention.kernel import DIMS


@pytest.mark.parametrize("tokens", [1, 2, 5, 16])
@pytest.mark.parametrize("dim", DIMS)
def test_splits_of_rows_of_unequal_lengths_add_up_to_attention(dim: int, tokens: int) -> None:
    each = rows((0, 7, 511, 512, 600), tokens, dim)
    output = tiled(each.queries, each.kv, each.lengths, each.end, each.scale)
    assert deviation(output, plain(each.queries, each.kv, each.lengths, each.end, each.scale)) < 1e-5


@pytest.mark.parametrize("seed", range(8))
def test_random_rows_heads_windows_and_sinks_add_up_to_attention(seed: int) -> None:
    random = np.random.default_rng(seed)
    kv_heads, group = int(random.integers(1, 4)), int(random.integers(1, 9))
    window = int(random.choice([0, 1, 16, 100, 300]))
    lengths = tuple(int(length) for length in random.integers(0, 700, 3))
    each = rows(lengths, int(random.integers(1, 17)), int(random.choice(DIMS)), heads=kv_heads * group,
                kv_heads=kv_heads, bits=0, has_sinks=bool(seed % 2), seed=seed)  # fmt: skip
    output = tiled(each.queries, each.kv, each.lengths, each.end, each.scale, window, each.sinks)
    expected = plain(each.queries, each.kv, each.lengths, each.end, each.scale, window, each.sinks)
    assert deviation(output, expected) < 1e-5


@pytest.mark.parametrize("bits", [8, 4])
def test_codes_are_the_numbers_that_they_stand_for(bits: int) -> None:
    each = rows((3, 300), 4, 64, bits=bits)
    output = tiled(each.queries, each.kv, each.lengths, each.end, each.scale)
    assert deviation(output, plain(each.queries, each.kv, each.lengths, each.end, each.scale)) < 1e-5


def test_more_splits_than_chains_are_all_added() -> None:
    each = rows((2_500, 40), 2, 64, heads=2, kv_heads=1, room=2_560)
    output = tiled(each.queries, each.kv, each.lengths, each.end, each.scale)
    assert deviation(output, plain(each.queries, each.kv, each.lengths, each.end, each.scale)) < 1e-5


def test_a_row_alone_is_what_it_is_beside_longer_ones() -> None:
    each = rows((5, 300, 600), 3, 64)
    output = tiled(each.queries, each.kv, each.lengths, each.end, each.scale, 100)
    own = each.row(1)
    assert mx.array_equal(tiled(own.queries, own.kv, own.lengths, own.end, own.scale, 100), output[1:2])
