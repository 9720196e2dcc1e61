"""Caches are taken apart and put together without a change."""

from itertools import pairwise

import mlx.core as mx
import pytest

from tests.support.caches import KINDS, WINDOW, contents, filled, grow, layout
from worker.kv.spans_and_checkpoints import KvLayout, arrays_of, assemble, copy_state, cut_span, slice_span, view_start

TOKENS = list(range(40, 60))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cuts", [(), (1,), (7, 8, 19)])
def test_spans_and_a_checkpoint_make_the_cache_that_they_came_from(kind: str, cuts: tuple[int, ...]) -> None:
    caches = filled(kind, TOKENS)
    edges = [0, *cuts, len(TOKENS)]
    spans = [slice_span(caches, begin, end) for begin, end in pairwise(edges)]
    made = assemble(layout(kind), spans, copy_state(caches), len(TOKENS))
    assert contents(made) == contents(caches)


@pytest.mark.parametrize("kind", KINDS)
def test_an_assembled_cache_shares_nothing_with_what_it_was_made_of(kind: str) -> None:
    caches = filled(kind, TOKENS)
    spans, state = [slice_span(caches, 0, len(TOKENS))], copy_state(caches)
    made = assemble(layout(kind), spans, state, len(TOKENS))
    grow(made, TOKENS, [99, 98, 97])
    assert contents(made) == contents(filled(kind, [*TOKENS, 99, 98, 97]))
    assert contents(assemble(layout(kind), spans, state, len(TOKENS))) == contents(caches)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_does_not_follow_the_cache_that_it_was_copied_from(kind: str) -> None:
    caches = filled(kind, TOKENS)
    spans, state = [slice_span(caches, 0, len(TOKENS))], copy_state(caches)
    grow(caches, TOKENS, [99])
    assert contents(assemble(layout(kind), spans, state, len(TOKENS))) == contents(filled(kind, TOKENS))


def test_the_halves_of_a_span_hold_no_more_memory_than_their_own() -> None:
    others = mx.get_active_memory()
    span = slice_span(filled("plain", range(4096)), 0, 4096)
    mx.eval(arrays_of(span, []))
    before = mx.get_active_memory() - others
    upper, lower = cut_span(span, 4096, 4000)
    mx.eval(arrays_of([*upper, *lower], []))
    del span, upper
    mx.synchronize()
    assert mx.get_active_memory() - others < before // 8 + (1 << 16)
    assert lower[0][0].shape[2] == 96


def test_a_view_of_the_start_of_a_span_reads_the_tokens_asked_for() -> None:
    caches = filled("plain", TOKENS)
    span = view_start(slice_span(caches, 0, len(TOKENS)), 6)
    assert [keys[0, 0, :, 0].tolist() for keys, _ in span] == [cache.keys[0, 0, :6, 0].tolist() for cache in caches]


def test_a_layout_counts_layers_inside_of_lists() -> None:
    layouts = {kind: KvLayout.of(make) for kind, make in KINDS.items()}
    assert {kind: (made.sliceable, made.windowed, made.stateful) for kind, made in layouts.items()} == {
        "plain": (2, 0, 0), "sliding": (1, 1, 0), "recurrent": (1, 0, 2), "lists": (3, 0, 1),
        "quantized": (2, 0, 0), "only recurrent": (0, 0, 2), "only sliding": (0, 2, 0), "two windows": (1, 2, 1),
    }  # fmt: skip
    assert layouts["two windows"].windows == ((WINDOW, 0), (WINDOW // 2, 2))
