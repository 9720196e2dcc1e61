"""Drafts of rows with a grammar: they change no token, and what the grammar forces is drafted."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from protocol.to_worker import ChatPrompt, Constraint, ConstraintKind, Generate, Sampling, TokensPrompt
from tests.support.engine import EngineHarness, spec
from tests.support.models import VOCAB
from tests.support.scale import patient, scaled
from tests.worker.structured.test_masks import mixed, tokens
from worker.model.pass_costs import PassCosts
from worker.speculation.policy import Speculator
from worker.speculation.text_sources import DraftSource
from worker.structured import masks
from worker.tools.verify.verifier import NoisyDrafts

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"is_it_raining": {"type": "boolean"}, "state_of_the_sky": {"enum": ["clear", "grey"]}},
    "required": ["is_it_raining", "state_of_the_sky"],
    "additionalProperties": False,
}


class Free(PassCosts):
    """Steps that take a second whatever their size, so that they are as wide as drafts are long."""

    def step(self, rows: int, width: int) -> float:
        return 1.0

    def has_step(self, rows: int, width: int, *, is_trusted: bool = False) -> bool:
        return True


def learned(engine: EngineHarness, drafter: NoisyDrafts) -> list[tuple[object, ...]]:
    """Each request alone and without drafts, which from now on there are."""
    alone = [engine.run([request])[0] for request in mixed()]
    for request, result in zip(mixed(), alone, strict=True):
        assert isinstance(request.prompt, TokensPrompt)
        drafter.learn([*request.prompt.ids, *result.ids])
    return [tokens(result) for result in alone]


@pytest.mark.parametrize("architecture", scaled(["qwen3", "gemma3_text", "qwen3_5"], ["qwen3"]))
def test_rows_with_grammars_and_drafts_of_any_length_equal_each_alone(
    architecture: str, model_folder: Callable[[str], Path]
) -> None:
    drafter = NoisyDrafts(VOCAB)
    with EngineHarness(spec(model_folder(architecture), prefill_chunk=64), drafter=drafter) as engine:
        alone = learned(engine, drafter)
        assert [tokens(result) for result in engine.run(mixed())] == alone
        drafter.drafted = drafter.accepted = 0
        constrained = [
            (request, result) for request, result in zip(mixed(), alone, strict=True) if request.rid in (2, 3)
        ]
        assert [tokens(engine.run([request])[0]) for request, _ in constrained] == [result for _, result in constrained]
    assert 10 < drafter.accepted < drafter.drafted


@pytest.mark.soak
def test_rows_whose_masks_are_late_in_a_step_with_drafts_keep_their_tokens(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = NoisyDrafts(VOCAB)
    with EngineHarness(spec(model_folder("qwen3")), drafter=drafter) as engine:
        alone = learned(engine, drafter)
        monkeypatch.setattr(masks, "MAX_PATIENCE_S", 0.0)
        assert [tokens(result) for result in engine.run(mixed())] == alone


def test_tokens_that_a_schema_forces_are_drafted_and_all_of_them_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    # Drafts whose masks are late are dropped, right or not.
    monkeypatch.setattr(masks, "MIN_PATIENCE_S", patient(5))
    monkeypatch.setattr(masks, "MAX_PATIENCE_S", patient(5))
    drafter = Speculator()
    drafter.costs = Free()
    asked = Generate(
        1,
        ChatPrompt([{"role": "user", "content": "What is the weather like?"}]),
        Sampling(temperature=0.0),
        max_tokens=40,
        constraint=Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(WEATHER)),
    )
    with EngineHarness(spec(Path("demo"), speculate="off")) as engine:
        plain = engine.run([asked])[0]
        plain_steps = engine.gauges.step_seq
    with EngineHarness(spec(Path("demo")), drafter=drafter) as engine:
        result = engine.run([asked])[0]
        steps = engine.gauges.step_seq
    assert tokens(result) == tokens(plain)
    assert set(json.loads(result.text)) == set(WEATHER["properties"])
    counts = drafter.counts[DraftSource.GRAMMAR]
    assert counts.accepted == counts.tokens > 6
    assert counts.drafts >= 2
    assert steps <= plain_steps - counts.accepted
