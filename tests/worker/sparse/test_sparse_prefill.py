"""Sparse prefill in a real engine: which tokens run, at which positions, and that nothing else changes the answer."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache
from mlx_lm.utils import load_model, save_model
from msgspec import structs

from protocol.from_worker import Finish
from protocol.spec import WorkerSpec
from protocol.to_worker import Abort, Generate, Sampling, TokensPrompt
from tests.support.engine import EngineHarness, Result, spec
from tests.support.heads import damp
from tests.support.models import VOCAB, build, shallow
from tests.worker.engine.test_exact import tokens
from worker.kv import ragged
from worker.sparse_prefill import BLOCK_TOKENS, LOOKAHEAD_TOKENS, SelectedTokens, count_kept
from worker.tools.verify.verifier import NoisyDrafts

# Two of its ten blocks are left out; what is kept and 256 tokens more fill the room of KV but for eight.
PROMPT = 9 * BLOCK_TOKENS + 120
KEEP = 0.8
GREEDY = Sampling(temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target, and a draft model that is another one of the same tokens."""
    target, draft = (build("qwen3", tmp_path_factory.mktemp("pair") / "model", **shallow("qwen3")) for _ in range(2))
    model, _ = load_model(draft)
    damp(model, 0.5)
    save_model(draft, model)
    return target, draft


def settings(pair: tuple[Path, Path], **more: Any) -> WorkerSpec:
    shared: dict[str, Any] = {"sparse_keep": KEEP, "sparse_from": 2 * BLOCK_TOKENS, "speculate": "off", **more}
    return spec(pair[0], draft=str(pair[1]), **shared)


def prompt(seed: int, length: int = PROMPT) -> TokensPrompt:
    return TokensPrompt(tuple(np.random.default_rng(seed).integers(20, 420, length).tolist()))


def request(rid: int, seed: int, **fields: Any) -> Generate:
    sampling = Sampling(temperature=0.8 if rid % 2 else 0.0, seed=rid, ignore_eos=True, repetition_penalty=1.1)
    asked: dict[str, Any] = {"max_tokens": 12, "top_logprobs": 1, "sparse_keep": 0.0, **fields}
    return Generate(rid, prompt(seed), sampling, **asked)


def requests() -> list[Generate]:
    """Sparse ones of two prompts, whole ones beside them, and one too short to be sparse."""
    whole = structs.replace(request(4, 3, sparse_keep=None), prompt=prompt(3, 300))
    short = structs.replace(request(5, 4), prompt=prompt(4, 100))
    return [request(1, 1), request(2, 2), request(3, 2, sparse_keep=0.9), whole, short]


@pytest.fixture(scope="module")
def engine(pair: tuple[Path, Path]) -> Iterator[EngineHarness]:
    """One that keeps no prefixes."""
    with EngineHarness(settings(pair, cache_bytes=0, prefill_chunk=64)) as engine:
        yield engine


@pytest.fixture(scope="module")
def alone(engine: EngineHarness) -> list[Result]:
    return [engine.run([each])[0] for each in requests()]


def assert_same(results: Sequence[Result], expected: Sequence[Result]) -> None:
    assert [tokens(each) for each in results] == [tokens(each) for each in expected]


class Masked(KVCache):
    """KV of the whole text, in which what follows does not see the tokens that were left out."""

    def __init__(self, kept: SelectedTokens, length: int) -> None:
        super().__init__()
        stays = np.zeros(length, dtype=bool)
        for begin, end in kept.runs:
            stays[begin:end] = True
        self.stays = mx.array(stays)

    def make_mask(self, count: int, *_: Any, **__: Any) -> mx.array:
        end = self.offset + count
        stays = mx.concatenate([self.stays, mx.ones(max(0, end - len(self.stays)), dtype=mx.bool_)])[:end]
        rows, columns = mx.arange(self.offset, end)[:, None], mx.arange(end)[None]
        return (rows >= columns) & (stays[None] | (rows == columns))


def test_the_answer_is_that_of_the_whole_prompt_with_what_was_left_out_hidden(
    pair: tuple[Path, Path], engine: EngineHarness
) -> None:
    row = engine.intake.row(structs.replace(request(12, 2), sampling=GREEDY), 0.0)
    result = engine.submit_row(row)
    engine.wait(lambda: result.terminals)
    assert row.kept is not None
    assert len(row.kept.runs) > 1
    model, _ = load_model(pair[0])
    caches = [Masked(row.kept, PROMPT) for _ in model.layers]
    inputs, said, logprobs = row.prompt, list[int](), list[float]()
    for _ in range(12):
        logits = model(mx.array([inputs]), cache=caches)[0, -1]
        inputs = [int(mx.argmax(logits).item())]
        said += inputs
        logprobs.append((logits[inputs[0]] - mx.logsumexp(logits)).item())
    assert result.ids == said
    assert [entry.logprob for entry in result.logprobs] == pytest.approx(logprobs, abs=1e-4)
    assert result.usage is not None
    assert (result.usage.prompt, result.usage.kept) == (PROMPT, count_kept(PROMPT, KEEP))
    assert row.kept.count == count_kept(PROMPT, KEEP) == PROMPT - 2 * BLOCK_TOKENS


@pytest.mark.soak
def test_what_is_kept_whole_answers_as_without(engine: EngineHarness, alone: list[Result]) -> None:
    whole, other = engine.run([request(1, 1, sparse_keep=None)]), alone[0]
    assert_same(engine.run([request(1, 1, sparse_keep=1.0)]), whole)
    assert other.ids != whole[0].ids, "what is left out must matter here"
    assert other.usage is not None
    assert whole[0].usage is not None
    assert (other.usage.kept, whole[0].usage.kept) == (count_kept(PROMPT, KEEP), 0)


def test_sparse_and_whole_rows_in_one_batch_answer_as_alone(engine: EngineHarness, alone: list[Result]) -> None:
    before = engine.gauges.snapshot()
    results: list[Result] = []
    for each in requests():
        seen = engine.gauges.step_seq
        results.append(engine.submit(each))
        engine.wait(lambda seen=seen, result=results[-1]: engine.gauges.step_seq > seen or result.terminals)
    engine.wait(lambda: all(result.terminals for result in results))
    stats = engine.gauges.snapshot()
    assert_same(results, alone)
    kept = sum(result.usage.kept for result in results if result.usage is not None)
    assert stats.sparse_prompts - before.sparse_prompts == 3
    assert stats.sparse_prompt_tokens - before.sparse_prompt_tokens == 3 * PROMPT
    assert stats.sparse_kept_tokens - before.sparse_kept_tokens == kept
    assert stats.sparse_read_s > 0


@pytest.mark.soak
def test_a_row_resumed_by_another_worker_goes_on_as_it_would_have(
    pair: tuple[Path, Path], alone: list[Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With drafts of any length, and attention over all of the room, as on CUDA."""
    monkeypatch.setattr(ragged, "sees_room", True)
    drafter = NoisyDrafts(VOCAB)
    for each, result in zip(requests(), alone, strict=True):
        assert isinstance(each.prompt, TokensPrompt)
        drafter.learn([*each.prompt.ids, *result.ids])
    with EngineHarness(settings(pair), drafter=drafter) as engine:
        resumed = [
            structs.replace(each, resume=tuple(whole.ids[:3])) for each, whole in zip(requests(), alone, strict=True)
        ]
        rest = engine.run(resumed)
    assert [[*whole.ids[:3], *result.ids] for whole, result in zip(alone, rest, strict=True)] == [
        whole.ids for whole in alone
    ]
    assert 0 < drafter.accepted < drafter.drafted


@pytest.mark.soak
def test_a_preempted_row_goes_on_as_it_would_have(pair: tuple[Path, Path], engine: EngineHarness) -> None:
    # The first 250 tokens of both outputs are given to them: the next ones cross the border.
    given = prompt(5, 250).ids
    sparse = request(1, 1, max_tokens=280, priority=1, resume=given)
    urgent = structs.replace(request(2, 3, sparse_keep=None, max_tokens=280, resume=given), prompt=prompt(3, 1016))
    expected = engine.run([sparse, urgent])
    limit = engine.kv_cost.bytes(2, 1280) + 1
    with EngineHarness(settings(pair, cache_bytes=0, kv_bytes=limit)) as small:
        first = small.submit(sparse)
        small.wait(lambda: first.ids)
        second = small.submit(urgent)
        small.wait(lambda: first.terminals and second.terminals)
        assert small.gauges.preemptions > 0
        assert small.ended == [2, 1]
    assert_same([first, second], expected)


@pytest.mark.soak
def test_nothing_of_a_sparse_prompt_is_stored_and_of_stored_ones_the_leading_part_is_reused(
    pair: tuple[Path, Path], alone: list[Result], tmp_path: Path
) -> None:
    disk: dict[str, Any] = {"disk_cache_dir": str(tmp_path / "prefixes"), "disk_cache_bytes": 1 << 30}
    with EngineHarness(settings(pair, cache_bytes=1 << 30, speculate="auto", **disk)) as engine:
        assert_same(engine.run(requests()[:1]), alone[:1])
        assert engine.loaded.proposer is not None
        assert engine.loaded.proposer.nbytes == engine.loaded.proposer.unread == 0, "it reads no prompt to draft"
        assert (len(engine.engine.cache), engine.engine.cache.nbytes) == (0, 0)
        whole = engine.run([request(9, 1, sparse_keep=None)])[0]
        assert whole.usage is not None
        assert whole.usage.cached == 0
        row = engine.intake.row(structs.replace(requests()[0], rid=31), 0.0)
        result = engine.submit_row(row)
        engine.wait(lambda: result.terminals)
    assert_same([result], alone[:1])
    assert row.kept is not None
    assert result.usage is not None
    assert result.usage.cached == row.kept.leading > 0


def test_streams_go_on_while_a_prompt_is_read_and_an_abort_ends_the_reading(engine: EngineHarness) -> None:
    running = structs.replace(request(20, 3, sparse_keep=None, max_tokens=2000), prompt=prompt(3, 20))
    stream = engine.submit(running)
    engine.wait(lambda: len(stream.ids) > 2)
    before = len(stream.ids)
    sparse = engine.submit(request(21, 8))
    engine.wait(lambda: sparse.ids or sparse.terminals)
    assert len(stream.ids) - before > 2
    gone = engine.submit(structs.replace(request(23, 7), prompt=prompt(7, 3900)))
    engine.wait(lambda: engine.engine.sparse.is_busy)
    engine.command(Abort((23,)))
    engine.wait(lambda: gone.terminals)
    assert gone.finish is Finish.ABORT
    engine.wait(lambda: engine.engine.sparse.nbytes == 0)
    engine.command(Abort((20,)))
    engine.wait(lambda: stream.terminals)
    assert gone.ids == []


def test_each_part_of_a_reading_is_a_step_that_keeps_its_request_alive(
    engine: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, seen = engine.engine.sparse, list[int]()
    step = rows.step

    def one_pass(_limit_s: float) -> None:
        seen.append(engine.gauges.step_seq)
        step(0.0)

    monkeypatch.setattr(rows, "step", one_pass)
    engine.run([request(40, 9, max_tokens=1)])
    assert len(seen) > LOOKAHEAD_TOKENS
    assert all(later > before for before, later in pairwise(seen))


def test_a_reading_that_fails_ends_its_own_request_only(engine: EngineHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_limit_s: float) -> None:
        raise ValueError("no such head")

    monkeypatch.setattr(engine.engine.sparse, "step", fail)
    broken, whole = engine.run([request(41, 10), request(42, 3, sparse_keep=None, max_tokens=3)])
    monkeypatch.undo()
    assert broken.failure is not None
    assert "its prompt was read by the draft model" in broken.failure.message
    assert broken.failure.detail == "ValueError: no such head"
    assert len(whole.ids) == 3
    assert engine.run([request(43, 10, max_tokens=3)])[0].finish is Finish.LENGTH
