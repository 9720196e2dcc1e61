"""Packed passes: parts with caches of their own go through a model's weights together."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache

from tests.support.engine import spec
from tests.support.models import KINDS
from tests.support.sequences import sequence_of
from worker.engine.forward import ForwardPart, forward
from worker.kv import batched
from worker.model import packing
from worker.model.loader import load


def part(model: Any, rows: list[list[int]]) -> ForwardPart:
    """Rows from their first token on."""
    width = max(len(row) for row in rows)
    caches = batched.merge([make_prompt_cache(model) for _ in rows])
    inputs = mx.array([[*row, *[0] * (width - len(row))] for row in rows])
    sequences = [sequence_of(row) for row in rows]
    return ForwardPart(sequences, inputs, caches, [len(row) for row in rows])


@pytest.mark.parametrize("architecture", KINDS)
def test_a_part_is_given_the_logits_that_it_has_alone(architecture: str, model_folder: Callable[[str], Path]) -> None:
    model = load(spec(model_folder(architecture)), lambda *_: None).model
    rows, chunks = [[20, 21, 22], [30, 31]], [[40 + at for at in range(9)], [60 + at for at in range(5)]]
    alone = forward(model, part(model, rows))
    prefill = part(model, chunks)
    packed = forward(model, part(model, rows), prefill)
    assert packed.shape == alone.shape == (2, 3, packed.shape[2])
    assert mx.allclose(packed[0], alone[0], atol=1e-5)
    assert mx.allclose(packed[1, :2], alone[1, :2], atol=1e-5)
    # The chunks' caches are what they are alone.
    batched.rewind(prefill.caches, prefill.excess)
    other = part(model, chunks)
    forward(model, other)
    batched.rewind(other.caches, other.excess)
    following = [
        forward(model, ForwardPart(each.sequences, mx.array([[7], [8]]), each.caches, [1, 1]))
        for each in (prefill, other)
    ]
    assert mx.allclose(*following, atol=1e-5)


def test_the_head_is_given_no_token_that_is_not_asked_for(model_folder: Callable[[str], Path]) -> None:
    model = load(spec(model_folder("qwen3")), lambda *_: None).model
    seen: list[tuple[int, ...]] = []

    class Watched(nn.Module):
        def __call__(self, x: mx.array) -> mx.array:
            seen.append(x.shape)
            return x

    packing.text_core(model).norm.module = Watched()
    forward(model, part(model, [[20], [30]]), part(model, [[40 + at for at in range(9)]]))
    assert seen == [(2, 1, 64)]


def test_modules_keep_their_attributes_behind_what_is_wrapped_around_them(model_folder: Callable[[str], Path]) -> None:
    model = load(spec(model_folder("qwen3")), lambda *_: None).model
    assert isinstance(model.layers[0].self_attn, packing.Mixing)
    assert model.layers[0].self_attn.k_proj.weight.shape == (32, 64)
    with pytest.raises(AttributeError):
        _ = model.layers[0].self_attn.absent
    packing.prepare(model)
    assert not isinstance(model.layers[0].self_attn.module, packing.Mixing), "once is enough"
