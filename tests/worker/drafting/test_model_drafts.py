"""A draft model beside its target: its drafts change no token, and one that cannot draft is refused with the reason."""

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model, save_model

from protocol.messages import Generate, Sampling, TokensPrompt
from tests.support.engine import EngineHarness, Result, spec
from tests.support.heads import damp
from tests.support.models import build
from tests.worker.engine.test_exact import requests, tokens
from worker.checked_model import load_checked
from worker.errors import LoadFailed
from worker.model.loader import Loaded
from worker.speculation.eager import EagerDrafts


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target, and a draft model that leaves out the little that the target's layers add."""
    folders: list[Path] = []
    for factor in (0.12, 0.0):
        folder = build("qwen3", tmp_path_factory.mktemp("pair") / "model")
        model, _ = load_model(folder)
        damp(model, factor)
        save_model(folder, model)
        folders.append(folder)
    return folders[0], folders[1]


def eager(loaded: Loaded) -> EagerDrafts:
    assert loaded.proposer is not None
    return EagerDrafts(loaded.proposer, 3)


def test_rows_with_drafts_of_a_second_model_equal_each_alone_without(pair: tuple[Path, Path]) -> None:
    """Greedy and seeded, with filters and penalties, joining and leaving; one prompt is read in several chunks."""
    long = Generate(99, TokensPrompt(tuple(20 + at * 7 % 400 for at in range(1200))), Sampling(temperature=0.0), 40)
    batch, (target, draft) = [long, *requests(10)], pair
    with EngineHarness(spec(target, speculate="off")) as engine:
        alone = [tokens(engine.run([request])[0]) for request in batch]
    with EngineHarness(spec(target, draft=str(draft)), drafter=eager) as engine:
        results: list[Result] = []
        for request in batch:
            seen = engine.gauges.step_seq
            results.append(engine.submit(request))
            engine.wait(lambda seen=seen, result=results[-1]: engine.gauges.step_seq > seen or result.terminals)
        engine.wait(lambda: all(result.terminals for result in results))
        drafter = engine.drafter
        assert engine.engine.speculation == f"auto, with drafts by {draft}"
    assert [tokens(result) for result in results] == alone
    assert isinstance(drafter, EagerDrafts)
    assert 20 < drafter.accepted < drafter.drafted


def test_its_weights_and_kv_count_as_those_of_the_target(pair: tuple[Path, Path]) -> None:
    target, draft = pair
    alone = load_checked(spec(target, speculate="off"), lambda *_: None)
    both = load_checked(spec(target, draft=str(draft)), lambda *_: None)
    assert both.weights_bytes == 2 * alone.weights_bytes
    with EngineHarness(spec(target, speculate="off")) as engine:
        own = engine.kv_cost
    with EngineHarness(spec(target, draft=str(draft))) as engine:
        assert engine.kv_cost.token_bytes == 2 * own.token_bytes


def test_a_model_that_is_asked_no_more_holds_nothing(pair: tuple[Path, Path]) -> None:
    proposer = load_checked(spec(pair[0], draft=str(pair[1])), lambda *_: None).proposer
    assert proposer is not None
    proposer.begin(lambda uids, *_: mx.zeros((len(uids),), dtype=mx.uint32))
    texts = [np.arange(20, 20 + length, dtype=np.int32) for length in (8, 600)]  # the longer is not read at once
    proposer.propose([1, 2], texts, [5, 5], 2)
    assert proposer.nbytes > 0
    proposer.end()
    assert proposer.nbytes == 0


def test_a_model_of_other_tokens_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    other = build("qwen3", tmp_path / "other")
    vocabulary = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(vocabulary.replace("<think>", "<thunk>"))
    with pytest.raises(
        LoadFailed, match=r"cannot draft for this model: token \d+ is '<think>' in .* and '<thunk>' there"
    ):
        load_checked(spec(pair[0], draft=str(other)), lambda *_: None)


def test_a_model_that_cannot_go_back_is_refused(pair: tuple[Path, Path], model_folder: Callable[[str], Path]) -> None:
    for architecture in ("qwen3_5", "gemma3_text"):
        with pytest.raises(LoadFailed, match="its caches cannot go back by some tokens"):
            load_checked(spec(pair[0], draft=str(model_folder(architecture))), lambda *_: None)


def test_a_target_that_cannot_verify_refuses_any(pair: tuple[Path, Path], model_folder: Callable[[str], Path]) -> None:
    with pytest.raises(LoadFailed, match="cannot verify drafts"):
        load_checked(spec(model_folder("afm7"), draft=str(pair[1])), lambda *_: None)
