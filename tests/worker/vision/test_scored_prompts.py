"""Log-probabilities of prompts that hold an image: each is what the model says of the prompt up to there."""

import time
from pathlib import Path

import numpy as np
import pytest

from protocol.to_worker import Generate, Sampling, TokensPrompt
from tests.support.engine import EngineHarness, Result, spec
from tests.support.small_towers import small_towers
from tests.support.vision_models import MediaPrompt, build, image, prompt
from worker.engine import generator

TOP = 3


def ask(engine: EngineHarness, rid: int, asked: MediaPrompt, count: int, top: int | None = None) -> Result:
    """An answer to the first `count` tokens of a prompt, which is scored with `top`."""
    request = Generate(
        rid,
        TokensPrompt(tuple(asked.ids[:count])),
        Sampling(temperature=0.0, ignore_eos=True),
        max_tokens=4,
        top_logprobs=TOP,
        prompt_logprobs=top,
    )
    row = engine.intake.row(request, time.monotonic())
    row.media = asked.media
    row.positions = None if asked.positions is None else asked.positions[:, :count]
    engine.results[rid] = Result()
    result = engine.submit_row(row)
    engine.wait(lambda: result.terminals, "its end")
    return result


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_entries_before_in_and_behind_an_image_are_those_of_what_comes_before(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A slice is smaller than the image, whose tokens see each other in one of these families.
    monkeypatch.setattr(generator, "SCORED_SLICE_TOKENS", 3)
    with small_towers():
        folder = build(family, tmp_path / family)
        asked = prompt(family, 1, [9, image(family, np.random.default_rng(3), 4, 4), 7])
        with EngineHarness(spec(folder, cache_bytes=1 << 28, batching="together")) as engine:
            plain = ask(engine, 1, asked, len(asked.ids))
            scored = ask(engine, 2, asked, len(asked.ids), TOP)
            behind = [ask(engine, 3 + at, asked, len(asked.ids) - at - 1) for at in range(2)]
    assert (scored.ids, scored.usage and scored.usage.cached) == (plain.ids, 0)
    assert [entry.id for entry in scored.prompt_logprobs] == asked.ids
    span = asked.media[0]
    assert {entry.id for entry in scored.prompt_logprobs[span.begin : span.end]} == set(
        asked.ids[span.begin : span.end]
    )
    for at, result in enumerate(behind):
        entry = scored.prompt_logprobs[len(asked.ids) - at - 1]
        assert next(token for token, _, _ in entry.top) == result.ids[0]
        values = [value for _, value in result.logprobs[0].top]
        assert [value for _, _, value in entry.top] == pytest.approx(values, abs=1e-4)
