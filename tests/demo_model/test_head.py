"""The head that ships with the demo model: most of what it drafts is what the model says."""

from pathlib import Path

import pytest

from deploy.demo_model.corpus.generate import held_out_samples
from deploy.demo_model.tokenizer import Renderer
from protocol.to_worker import Generate, Sampling, TokensPrompt
from tests.support.demo_answers import SHIPPED
from tests.support.engine import EngineHarness, spec
from worker.model.loader import LoadedModel
from worker.tools.verify.verifier import EagerDrafts

# Of drafts of three tokens each, a token that follows a wrong one counted as wrong.
LEAST = 0.6


def eager(loaded: LoadedModel) -> EagerDrafts:
    assert loaded.proposer is not None, loaded.no_head
    return EagerDrafts(loaded.proposer, 3)


@pytest.mark.soak
def test_most_drafts_in_small_talk_are_right() -> None:
    from tokenizers import Tokenizer

    tokenizer, renderer = Tokenizer.from_file(str(SHIPPED / "tokenizer.json")), Renderer()
    samples = held_out_samples("small talk", 60, seed=3)
    requests = [
        Generate(
            rid, TokensPrompt(tuple(tokenizer.encode(renderer.prompt(sample)).ids)), Sampling(temperature=0.0), 120
        )
        for rid, sample in enumerate(samples)
    ]
    with EngineHarness(spec(Path("demo"), cache_bytes=0), drafter=eager) as engine:
        results = engine.run(requests)
        drafter = engine.drafter
    assert all(sample.messages[-1]["content"] in result.text for sample, result in zip(samples, results, strict=True))
    assert isinstance(drafter, EagerDrafts)
    assert drafter.accepted > LEAST * drafter.drafted > 30
