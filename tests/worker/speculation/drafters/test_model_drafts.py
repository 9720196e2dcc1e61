"""A draft model beside its target: its drafts change no token, and one that cannot draft is refused with the reason."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model, save_model

from protocol.to_worker import Abort, Generate, Sampling, TokensPrompt
from tests.support.drafted import Drafted
from tests.support.engine import EngineHarness, Result, spec
from tests.support.heads import damp
from tests.support.models import VOCAB, build
from tests.worker.engine.test_exact import requests, tokens
from worker.errors import LoadFailed
from worker.model.loader import LoadedModel
from worker.speculation.drafters.model_drafts import MAX_SHARED_TOKENS, MAX_SHARED_TOTAL_TOKENS, ModelDrafts
from worker.start.checked_model import load_checked
from worker.tools.verify.verifier import EagerDrafts


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


def eager(loaded: LoadedModel) -> EagerDrafts:
    assert loaded.proposer is not None
    return EagerDrafts(loaded.proposer, 3)


@pytest.mark.soak
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


class Counting:
    """A draft model that adds up the tokens that it is given between two looks."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = load_model(folder)[0]
        self.layers = self.model.layers
        self.fed = 0
        self.by_tick: dict[int, int] = {}
        self.now: Callable[[], int] = lambda: 0

    def __call__(self, tokens: mx.array, cache: Any) -> Any:
        self.fed += tokens.size
        self.by_tick[self.now()] = self.by_tick.get(self.now(), 0) + tokens.size
        return self.model(tokens, cache=cache)


def proposer_of(model: Counting) -> ModelDrafts:
    proposer = ModelDrafts(model, VOCAB, VOCAB)
    proposer.begin(lambda rows, *_: mx.zeros((len(rows),), dtype=mx.uint32), lambda: ([], []))
    model.fed = 0
    return proposer


def text(length: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.arange(20, 20 + length, dtype=np.int32) % VOCAB


@pytest.mark.soak
def test_a_long_prompt_takes_no_more_of_a_tick_than_a_slice(pair: tuple[Path, Path]) -> None:
    """One stream runs; beside it a prompt of 800 tokens is answered, and another leaves while it is read."""
    target, draft = pair
    ids = tuple(20 + at * 7 % 400 for at in range(800))
    greedy = Sampling(temperature=0.0, ignore_eos=True)
    stream = Generate(1, TokensPrompt((20, 21, 22)), greedy, 300)
    long = Generate(2, TokensPrompt(ids), greedy, 80)
    leaving = Generate(3, TokensPrompt(ids[::-1]), greedy, 300)
    with EngineHarness(spec(target, speculate="off")) as engine:
        alone = [result.ids for result in (engine.run([stream])[0], engine.run([long])[0])]
    model = Counting(draft)
    drafter = EagerDrafts(ModelDrafts(model, VOCAB, VOCAB), 3)
    with EngineHarness(spec(target, prefill_chunk=64), drafter=drafter) as engine:
        model.now = lambda: engine.gauges.step_seq
        running = engine.submit(stream)
        engine.wait(lambda: len(running.ids) > 4)
        model.by_tick.clear()
        left, answered = engine.submit(leaving), engine.submit(long)
        engine.wait(lambda: len(left.ids) > 2)
        engine.command(Abort((3,)))
        engine.wait(lambda: all(result.terminals for result in (running, answered)))
        assert drafter.unread == 0
    assert [running.ids, answered.ids] == alone
    assert sum(model.by_tick.values()) > 800, "it was read"
    assert max(model.by_tick.values()) <= 64 + MAX_SHARED_TOTAL_TOKENS + 3 * MAX_SHARED_TOKENS
    assert drafter.accepted > 100


def test_rows_are_read_one_after_the_other_and_draft_once_they_have_been(pair: tuple[Path, Path]) -> None:
    model = Counting(pair[1])
    proposer, first, second = proposer_of(model), Drafted(), Drafted()
    assert proposer.propose([first, second], [text(600), text(300)], [5, 5], 2) == [[], []]
    assert (model.fed, proposer.unread) == (0, 900)
    assert proposer.is_reading(first)
    assert proposer.read(64) == 64
    assert (model.fed, proposer.unread) == (64, 836)
    proposer.discard(first)
    assert proposer.unread == 300
    while proposer.is_reading(second):
        proposer.read(128)
    assert model.fed == 364
    # Meanwhile it has said more than the others would wait for.
    assert proposer.propose([second], [text(400)], [5], 2) == [[]]
    assert proposer.read(512) == 100
    assert [len(draft) for draft in proposer.propose([second], [text(402)], [5], 2)] == [2]
    assert proposer.read(512) == 0


def test_a_model_that_is_asked_no_more_holds_nothing(pair: tuple[Path, Path]) -> None:
    proposer = proposer_of(Counting(pair[1]))
    proposer.propose([Drafted(), Drafted()], [text(8), text(600)], [5, 5], 2)
    proposer.read(64)
    assert proposer.nbytes > 0
    proposer.end()
    assert (proposer.nbytes, proposer.unread) == (0, 0)


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
