"""Questions behind a prompt with an image: their answers are those of the whole prompt, and repeat their bits."""

import time
from array import array
from pathlib import Path

import numpy as np
import pytest

from protocol.group import RowQuestion
from protocol.to_worker import Generate, Sampling, TokensPrompt
from tests.support.engine import EngineHarness, Result, spec
from tests.support.small_towers import small_towers
from tests.support.vision_models import MediaPrompt, build, image, prompt
from worker.engine import generator
from worker.engine import row as questions


def ask(engine: EngineHarness, rid: int, given: MediaPrompt, count: int, asked: list[RowQuestion] | None) -> Result:
    """Answers to questions behind the first `count` tokens of a prompt, or their scores."""
    request = Generate(
        rid, TokensPrompt(tuple(given.ids[:count])), Sampling(), 0, prompt_logprobs=0 if asked is None else None
    )
    row = engine.intake.row(request, time.monotonic())
    row.media = given.media
    row.positions = None if given.positions is None else given.positions[:, :count]
    if asked is not None:
        row.questions, row.max_tokens = questions.RowQuestions(asked, questions.slice_ends(count, given.media)), 1
        row.cache_salt = "questions"
    engine.results[rid] = Result()
    result = engine.submit_row(row)
    engine.wait(lambda: result.terminals, "its end")
    return result


def numbers(result: Result) -> list[float]:
    return array("f", b"".join(delta.data for delta in result.deltas)).tolist()


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_answers_behind_an_image_are_those_of_the_whole_prompt(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A slice is smaller than the image, whose tokens see each other in one of these families.
    monkeypatch.setattr(questions, "SLICE_TOKENS", 3)
    monkeypatch.setattr(generator, "SLICE_TOKENS", 3)
    with small_towers():
        folder = build(family, tmp_path / family)
        given = prompt(family, 1, [9, image(family, np.random.default_rng(3), 4, 4), 14])
        count, (*tail, label) = given.media[0].end + 5, given.ids[given.media[0].end + 5 :]
        question, other = RowQuestion(tail, [[label], [label + 1]]), RowQuestion(tail[:2], [[20, 21], [20, 22]])
        with EngineHarness(spec(folder, cache_bytes=1 << 28, batching="together")) as engine:
            alone = ask(engine, 1, given, count, [question])
            both = ask(engine, 2, given, count, [other, question])
            scored = ask(engine, 3, given, len(given.ids), None)
    assert questions.slice_ends(count, given.media)[2:4] == [9, given.media[0].end]
    assert numbers(alone)[0] == pytest.approx(scored.prompt_logprobs[-1].logprob, abs=1e-4)
    assert numbers(both)[2:] == numbers(alone)
    assert alone.usage is not None
    assert both.usage is not None
    assert (alone.usage.cached, both.usage.cached) == (0, given.media[0].end + 3)
