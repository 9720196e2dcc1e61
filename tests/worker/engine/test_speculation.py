"""Drafts change no token: whatever is drafted, a request's output is what it is without."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from msgspec import structs

from protocol.to_worker import Abort, Constraint, ConstraintKind, Generate, Sampling, TokensPrompt
from tests.support.engine import EngineHarness, Result, spec
from tests.support.models import ARCHITECTURES, LANES, VOCAB
from tests.support.prefix_checks import check_cache
from tests.support.scale import scaled
from tests.worker.engine.test_exact import requests, tokens
from worker.engine.decode_batch import DecodeBatch
from worker.speculation.draft_state import DraftedRow
from worker.speculation.drafter import Drafter
from worker.tools.verify.verifier import NoisyDrafts

GREEDY = Sampling(temperature=0.0)
ENDLESS = Sampling(temperature=0.0, ignore_eos=True)
VERIFIED = scaled(list(ARCHITECTURES), ["gemma3_text", "qwen3_5"])


def learned(engine: EngineHarness, drafter: NoisyDrafts, batch: Sequence[Generate]) -> list[Result]:
    """Each request alone and without drafts, which from now on there are."""
    alone = [engine.run([request])[0] for request in batch]
    assert drafter.drafted == 0
    for request, result in zip(batch, alone, strict=True):
        assert isinstance(request.prompt, TokensPrompt)
        drafter.learn([*request.prompt.ids, *request.resume, *result.ids])
    return alone


@pytest.mark.parametrize("architecture", VERIFIED)
def test_rows_with_drafts_of_any_length_equal_each_alone(
    architecture: str, model_folder: Callable[[str], Path]
) -> None:
    """Greedy and seeded, with filters, penalties, a grammar and log-probabilities, joining and leaving."""
    batch = [structs.replace(request, top_logprobs=2 if request.rid % 3 == 0 else None) for request in requests(12)]
    batch[5] = structs.replace(batch[5], constraint=Constraint(ConstraintKind.REGEX, "[a-z ]+"), max_tokens=30)
    drafter = NoisyDrafts(VOCAB)
    with EngineHarness(spec(model_folder(architecture), prefill_chunk=64), drafter=drafter) as engine:
        alone = learned(engine, drafter, batch)
        results: list[Result] = []
        for request in batch:
            seen = engine.gauges.step_seq
            results.append(engine.submit(request))
            engine.wait(lambda seen=seen, result=results[-1]: engine.gauges.step_seq > seen or result.terminals)
        engine.wait(lambda: all(result.terminals for result in results))
    assert [tokens(result) for result in results] == [tokens(result) for result in alone]
    for result, other in zip(results, alone, strict=True):
        assert [entry.token for entry in result.logprobs] == [entry.token for entry in other.logprobs]
        assert [entry.logprob for entry in result.logprobs] == pytest.approx(
            [entry.logprob for entry in other.logprobs], abs=1e-4
        )
    assert drafter.accepted > 20
    assert drafter.accepted < drafter.drafted


# What is computed of a row's own text, or bounds what it may say.
PROCESSED: list[dict[str, Any]] = [
    {"logit_bias": {30: 3.0, 40: -100.0}},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.6, "frequency_penalty": 0.5},
    {"frequency_penalty": 0.5, "repetition_penalty": 1.2, "penalty_window": 7},
    {"dry_multiplier": 0.8, "dry_allowed_length": 1},
    {"allowed_ids": tuple(range(20, 60)), "frequency_penalty": 1.0},
    {"bad_words": ("a", "th"), "repetition_penalty": 1.1},
    {"min_tokens": 12, "stop_ids": tuple(range(10, 250)), "frequency_penalty": 0.3},
]


@pytest.mark.parametrize("architecture", scaled(VERIFIED, ["qwen3_5"]))
def test_rows_whose_text_changes_their_logits_keep_drafts_and_tokens(
    architecture: str, model_folder: Callable[[str], Path]
) -> None:
    """Penalties, bias and limits: each position of a block has the logits that its own text gives it."""
    batch = [
        Generate(
            rid,
            TokensPrompt((20, 21, 22 + rid, *range(30, 30 + 3 * rid))),
            Sampling(temperature=0.0 if rid % 2 else 0.9, seed=rid, **settings),
            max_tokens=30,
            top_logprobs=2 if rid == 4 else None,
        )
        for rid, settings in enumerate(PROCESSED)
    ]
    drafter = NoisyDrafts(VOCAB)
    with EngineHarness(spec(model_folder(architecture)), drafter=drafter) as engine:
        alone = learned(engine, drafter, batch)
        results = engine.run(batch)
    assert [tokens(result) for result in results] == [tokens(result) for result in alone]
    for result, other in zip(results, alone, strict=True):
        assert [entry.logprob for entry in result.logprobs] == pytest.approx(
            [entry.logprob for entry in other.logprobs], abs=1e-4
        )
    assert 40 < drafter.accepted < drafter.drafted


def test_a_processor_that_fails_behind_a_wrong_draft_has_not_failed(model_folder: Callable[[str], Path]) -> None:
    """It does where its row comes to that text, and not before."""
    prompt, drafter, unknown = (20, 21, 22), NoisyDrafts(VOCAB), list[list[int]]()

    def only(text: list[int]) -> Callable[[mx.array, mx.array], mx.array]:
        def look(context: mx.array, logits: mx.array) -> mx.array:
            seen: Any = context.tolist()
            if seen == text[: len(seen)]:
                return logits
            unknown.append(seen)
            raise RuntimeError("a text that it does not know")

        return look

    with EngineHarness(spec(model_folder("qwen3")), drafter=drafter) as engine:
        whole = learned(engine, drafter, [Generate(1, TokensPrompt(prompt), ENDLESS, 30)])[0].ids
        known = engine.submit(Generate(2, TokensPrompt(prompt), ENDLESS, 30), [only([*prompt, *whole])])
        engine.wait(lambda: known.terminals)
        assert unknown
        failing = engine.submit(Generate(3, TokensPrompt(prompt), ENDLESS, 30), [only([*prompt, *whole[:10]])])
        engine.wait(lambda: failing.terminals)
    assert known.ids == whole
    assert drafter.accepted
    assert failing.failure is not None
    assert failing.ids == whole[: len(failing.ids)]
    assert len(failing.ids) <= 11


@pytest.mark.parametrize("architecture", scaled(list(LANES), ["llama4"]))
def test_rows_of_lanes_that_cannot_verify_are_never_given_drafts(
    architecture: str, model_folder: Callable[[str], Path]
) -> None:
    batch = requests(3)
    drafter = NoisyDrafts(VOCAB)
    with EngineHarness(spec(model_folder(architecture)), drafter=drafter) as engine:
        alone = learned(engine, drafter, batch)
        assert [tokens(result) for result in engine.run(batch)] == [tokens(result) for result in alone]
    assert drafter.drafted == 0


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text", "qwen3_5"])
def test_rows_with_drafts_end_where_they_would_have(architecture: str, model_folder: Callable[[str], Path]) -> None:
    """The end may be at each place of a block: by budget, by a token that ends the text, by a stop string."""
    whole = [Generate(rid, TokensPrompt((20, 21, 22 + rid)), ENDLESS, max_tokens=24) for rid in (1, 2)]
    drafter = NoisyDrafts(VOCAB, longest=5)
    with EngineHarness(spec(model_folder(architecture), cache_bytes=1 << 26), drafter=drafter) as engine:
        alone = learned(engine, drafter, whole)
        for count in range(1, 24, scaled(1, 4)):
            cut = engine.run([structs.replace(each, rid=each.rid + 10 * count, max_tokens=count) for each in whole])
            assert [result.ids for result in cut] == [result.ids[:count] for result in alone]
        text = alone[0].text
        for begin in range(2, len(text) - 4, scaled(2, 9)):
            stopped = engine.run([structs.replace(whole[0], rid=1000 + begin, stop=(text[begin : begin + 3],))])[0]
            assert stopped.text == text[: text.find(text[begin : begin + 3])]
        check_cache(engine.engine.cache)
    assert drafter.accepted > 20


@pytest.mark.parametrize("architecture", scaled(["qwen3", "qwen3_5"], ["qwen3_5"]))
def test_rows_with_drafts_that_make_room_or_are_resumed_keep_their_tokens(
    architecture: str, model_folder: Callable[[str], Path]
) -> None:
    # Admission counts on 256 tokens of output; these rows, resumed after 250, grow past a step of 256 beyond that.
    batch = [
        Generate(
            rid,
            TokensPrompt(tuple(20 + (rid * 31 + at * 7) % 400 for at in range(240))),
            Sampling(temperature=0.8 if rid % 2 else 0.0, seed=rid, ignore_eos=True),
            max_tokens=290,
            resume=tuple(20 + (rid * 17 + at * 5) % 400 for at in range(250)),
        )
        for rid in (1, 2, 3)
    ]
    drafter = NoisyDrafts(VOCAB)
    folder = model_folder(architecture)
    with EngineHarness(spec(folder, cache_bytes=1 << 28), drafter=drafter) as engine:
        alone = [result.ids for result in learned(engine, drafter, batch)]
        cost = engine.kv_cost
        rest = [
            structs.replace(request, rid=100 + request.rid, resume=(*request.resume, *ids[:20]))
            for request, ids in zip(batch, alone, strict=True)
        ]
        assert [result.ids for result in engine.run(rest)] == [ids[20:] for ids in alone]
        leaving = engine.submit(structs.replace(batch[0], rid=7))
        engine.wait(lambda: len(leaving.ids) > 5)
        engine.command(Abort((7,)))
        engine.wait(lambda: leaving.terminals == 1)
        assert leaving.ids == alone[0][: len(leaving.ids)]
    with EngineHarness(spec(folder, cache_bytes=1 << 28, kv_bytes=cost.bytes(3, 512) + 1), drafter=drafter) as engine:
        assert [result.ids for result in engine.run(batch)] == alone
        assert engine.gauges.preemptions > 0


class Guessing(Drafter):
    """Drafts of one token, for each row that can take it."""

    widest = 2

    def is_ready(self, rows: Sequence[DraftedRow], most: Sequence[int]) -> bool:
        return any(most)

    def drafts(self, rows: Sequence[DraftedRow], newest: Sequence[int], most: Sequence[int]) -> list[list[int]]:
        return [[20][:limit] for limit in most]


def test_tokens_that_processors_are_given_do_not_pile_up_uncomputed_beside_drafts(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    verify = DecodeBatch._verify  # pyright: ignore[reportPrivateUsage]
    graphs: list[int] = []

    def watched(self: DecodeBatch, *args: Any) -> Any:
        sampled = verify(self, *args)
        for sequence in self.sequences:
            if sequence.context is not None:
                mx.export_to_dot(str(tmp_path / "graph"), sequence.context.state)
                graphs.append((tmp_path / "graph").read_text().count("label"))
        return sampled

    monkeypatch.setattr(DecodeBatch, "_verify", watched)
    prompt = TokensPrompt((20, 21, 22))
    biased = structs.replace(ENDLESS, logit_bias={30: 1.0})  # which looks at none of them
    with EngineHarness(spec(model_folder("qwen3")), drafter=Guessing()) as engine:
        company = engine.submit(Generate(1, prompt, ENDLESS, 1500))
        engine.wait(lambda: company.ids)
        engine.run([Generate(2, prompt, biased, 12)])
        engine.command(Abort((1,)))
    assert len(graphs) > 4
    assert not any(graphs)
