"""Forward passes that the loop makes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

from tests.support.engine import spec
from tests.support.sequences import sequence_of
from worker.engine.generator import Generator
from worker.engine.row import BatchSequence
from worker.model.batch_mode import BatchMode
from worker.model.loader import load
from worker.sampling.sampler import RowSampler
from worker.speculation.drafter import Drafter


class Watched:
    """A model that keeps the shape of what it is called with, and whether a mask was needed."""

    def __init__(self, model: Any) -> None:
        self.layers = model.layers
        self.shapes: list[tuple[int, ...]] = []
        self.masks: list[Any] = []
        self._model = model

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        self.shapes.append(tuple(inputs.shape))
        self.masks.append(cache[0].make_mask(inputs.shape[1]))
        return self._model(inputs, cache=cache)


def generator_of(folder: Path, pass_tokens: int = 0) -> tuple[Generator, Watched, Callable[[list[int]], BatchSequence]]:
    model = Watched(load(spec(folder), lambda *_: None).model)
    generator = Generator(model, RowSampler(), BatchMode.TOGETHER, Drafter(), pass_tokens)

    def insert(prompt: list[int]) -> BatchSequence:
        sequence = sequence_of(prompt)
        generator.insert(sequence)
        return sequence

    return generator, model, insert


def test_a_prompts_last_token_runs_in_the_step_of_the_rows_that_generate(model_folder: Callable[[str], Path]) -> None:
    generator, model, insert = generator_of(model_folder("qwen3"))
    first = insert([5, 6, 7, 8])
    for _ in range(3):
        generator.run_passes(64)
    model.shapes.clear()
    second = insert([9, 10, 11])
    generator.run_passes(64)
    assert model.shapes == [(1, 1), (1, 2)], "a step, and the second prompt but for its last token"
    generator.run_passes(64)
    _, sampled = generator.run_passes(64)
    assert model.shapes[2:] == [(2, 1), (2, 1)]
    assert {each.row for each in sampled} == {first.row, second.row}


def test_media_that_no_chunk_may_cut_run_in_one_pass_only_as_far_as_the_pass_has_room(
    model_folder: Callable[[str], Path],
) -> None:
    generator, model, insert = generator_of(model_folder("qwen3"), pass_tokens=64)
    for length in (24, 20, 30, 9):
        insert([7] * length + [8]).longest_whole = length if length > 9 else 0
    generator.run_passes(30)  # widened for the longest of them
    generator.run_passes(30)
    generator.run_passes(30)

    prompts = [shape for shape in model.shapes if shape[1] > 1]
    assert prompts == [(2, 24), (2, 30)], "the third row would have made it 90 tokens"


def test_rows_of_equal_length_are_computed_without_a_mask(model_folder: Callable[[str], Path]) -> None:
    generator, model, insert = generator_of(model_folder("qwen3"))
    insert([5, 6, 7, 8])
    insert([9, 10, 11, 12])
    for _ in range(3):
        generator.run_passes(64)
    assert model.masks == ["causal", None, None]
    insert([13, 14])
    for _ in range(3):
        generator.run_passes(64)
    assert isinstance(model.masks[-1], mx.array), "a shorter row needs one"
