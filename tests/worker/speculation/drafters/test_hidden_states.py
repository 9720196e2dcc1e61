"""Hidden states that are kept for those who draft hold no more memory than is counted."""

import gc
from typing import Any

import mlx.core as mx

from tests.support.sequences import sequence_of
from worker.engine.forward import ForwardPart, forward
from worker.speculation.drafters.target import HiddenStateCapture

SIZE, CHUNK, PASSES = 256, 512, 16


class Tapped:
    """A model of random hidden states, of which no more is looked at than what its capture keeps."""

    def __init__(self) -> None:
        self.capture = HiddenStateCapture()
        self.capture.is_on = True

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        states = mx.random.normal((*tokens.shape, SIZE))
        self.capture.see(0, states)
        return states


def part(tokens: int, left: int) -> ForwardPart:
    sequence = sequence_of([5], segments=[[5] * tokens, [5] * left, [5]])
    return ForwardPart([sequence], mx.zeros((1, tokens), dtype=mx.uint32), [], [tokens])


def test_states_of_a_step_that_a_chunk_rode_on_do_not_hold_those_of_the_chunk() -> None:
    model: Any = Tapped()
    gc.collect()
    before = mx.get_active_memory()
    for _ in range(PASSES):
        mx.eval(forward(model, part(1, 0), part(CHUNK, CHUNK)))
    gc.collect()
    held = mx.get_active_memory() - before
    assert len(model.capture.records) >= PASSES
    assert model.capture.nbytes <= PASSES * SIZE * 4
    assert held < PASSES * CHUNK * SIZE * 4 / 4
