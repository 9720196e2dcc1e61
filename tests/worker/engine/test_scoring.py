"""Log-probabilities of prompts: those of one forward pass over all of it, whoever else is in the batch."""

import itertools
import math
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from msgspec import structs

from protocol.failures import Code
from protocol.from_worker import Finish, TokenLogprob
from protocol.to_worker import Abort, Generate, Sampling, TokensPrompt
from tests.support.engine import EngineHarness, Result, spec
from tests.support.models import VOCAB
from tests.support.scale import patient, scaled
from worker.engine.batch import Batch
from worker.engine.decode_batch import SequenceGroup
from worker.engine.generator import SCORED_SLICE_TOKENS, Generator, ScoredRows
from worker.engine.scheduling.pacing import ChunkPlan, Pacer
from worker.sampling.logprobs import LogprobReader, PromptScore

rids = itertools.count(1)
LENGTHS = (1, 2, SCORED_SLICE_TOKENS, SCORED_SLICE_TOKENS + 1, 2 * SCORED_SLICE_TOKENS + 3)


def scored(ids: tuple[int, ...], top: int = 2, max_tokens: int = 1) -> Generate:
    sampling = Sampling(temperature=0.0)
    return Generate(next(rids), TokensPrompt(ids), sampling, max_tokens, top_logprobs=top, echo=True)


def prompts(seed: int = 3) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.randrange(10, VOCAB) for _ in range(length)) for length in LENGTHS]


def entries(result: Result) -> list[tuple[bytes, float, Any]]:
    return [(each.token, -1.0 if math.isnan(each.logprob) else each.logprob, each.top) for each in result.logprobs]


@pytest.mark.parametrize(
    "architecture", scaled(["qwen3", "gemma3_text", "qwen3_5", "afm7", "llama4"], ["gemma3_text", "afm7"])
)
def test_scores_are_those_of_one_pass_and_the_same_in_any_company(
    architecture: str, model_folder: Callable[[str], Path]
) -> None:
    with EngineHarness(spec(model_folder(architecture), prefill_chunk=128)) as engine:
        requests = [scored(ids) for ids in prompts()]
        alone = [engine.run([request])[0] for request in requests]
        others = [
            Generate(next(rids), TokensPrompt(ids), Sampling(temperature=0.0, ignore_eos=True), max_tokens=12)
            for ids in prompts(4)
        ]
        plain = [engine.run([structs.replace(request, rid=next(rids), echo=False)])[0] for request in requests]
        again = [structs.replace(request, rid=next(rids)) for request in requests]
        together = engine.run([*others, *again])[len(others) :]
        references = [engine.loaded.model(mx.array([ids])) for ids in prompts()]
        mx.eval(references)

    for ids, one, company, without, logits in zip(prompts(), alone, together, plain, references, strict=True):
        assert entries(company) == entries(one)
        assert (company.ids, one.ids) == (without.ids, without.ids)
        assert len(one.logprobs) == len(ids) + 1
        assert math.isnan(one.logprobs[0].logprob)
        logprobs = logits[0] - mx.logsumexp(logits[0], axis=-1, keepdims=True)
        for at in range(1, len(ids)):
            entry = one.logprobs[at]
            assert entry.logprob == pytest.approx(logprobs[at - 1, ids[at]].item(), abs=1e-4)
            assert entry.top[0][1] == pytest.approx(mx.max(logprobs[at - 1]).item(), abs=1e-4)
            assert entry.top[0][1] >= entry.top[1][1]
        # What is generated comes behind it.
        assert one.logprobs[len(ids) :] == without.logprobs or without.logprobs == []


def test_nothing_need_be_generated_and_every_token_has_an_entry(model_folder: Callable[[str], Path]) -> None:
    with EngineHarness(spec(model_folder("qwen3"))) as engine:
        (ids, *_) = (each for each in prompts() if len(each) == SCORED_SLICE_TOKENS + 1)
        result = engine.run([scored(ids, top=0, max_tokens=0)])[0]
        assert (result.finish, len(result.logprobs), result.ids) == (Finish.LENGTH, len(ids), [])
        assert result.text == engine.intake.vocabulary.decode(ids)
        assert all(entry.top == () for entry in result.logprobs)

        # An end that is sampled at once has an entry too: clients count them.
        ends = structs.replace(scored(ids), sampling=Sampling(0.0, logit_bias={engine.loaded.eos_ids[0]: 100.0}))
        ended = engine.run([ends])[0]
        assert (ended.finish, len(ended.logprobs)) == (Finish.STOP, len(ids) + 1)


def test_an_abort_amid_the_scores_lets_go_of_the_row(model_folder: Callable[[str], Path]) -> None:
    rng = random.Random(1)
    long = tuple(rng.randrange(10, VOCAB) for _ in range(1500))
    with EngineHarness(spec(model_folder("qwen3"))) as engine:
        request = structs.replace(scored(long), want_progress=True)
        result = engine.submit(request)
        engine.wait(lambda: result.progress, "some progress")
        engine.command(Abort((request.rid,)))
        engine.wait(lambda: result.terminals, "its end")
        assert result.finish is Finish.ABORT
        after = engine.run([scored(long[:100])])[0]
        assert len(after.logprobs) == 101
        engine.wait(lambda: engine.gauges.running == 0)


def test_a_tick_that_fails_behind_the_scores_of_a_row_loses_none_of_them(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[SequenceGroup] = []
    park = Batch._park  # pyright: ignore[reportPrivateUsage]

    def fail_once(batch: Batch) -> None:
        is_first = not told
        told.extend(rows for rows in batch._generator._scored.rows if rows.sequences[0].scores is None)  # pyright: ignore[reportPrivateUsage]
        if is_first and told:
            raise RuntimeError("[metal::malloc] Unable to allocate 5 bytes.")
        park(batch)

    monkeypatch.setattr(Batch, "_park", fail_once)
    (ids, *_) = (each for each in prompts() if len(each) == 2 * SCORED_SLICE_TOKENS + 3)
    with EngineHarness(spec(model_folder("qwen3"))) as engine:
        result = engine.run([scored(ids, max_tokens=0)])[0]
    assert told
    assert (result.finish, len(result.logprobs), result.ids) == (Finish.LENGTH, len(ids), [])


@pytest.mark.parametrize("is_generating", [True, False])
def test_beside_a_row_that_generates_or_is_in_prefill_prompts_are_scored_one_at_a_time(
    is_generating: bool, model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    are_all_sent = threading.Event()
    slices: list[int] = []
    beside: list[int] = []
    run, step = ScoredRows.run, Generator.run_passes

    def counted_run(self: ScoredRows, rows: SequenceGroup, most: int) -> int:
        slices[-1] += 1
        return run(self, rows, most)

    def counted_step(self: Generator, *args: Any, **settings: Any) -> Any:
        assert are_all_sent.wait(patient(60))
        slices.append(0)
        stepped = step(self, *args, **settings)
        others = self._decode if is_generating else self._prefill  # pyright: ignore[reportPrivateUsage]
        beside.extend(slices[-1:] if len(others) else ())
        return stepped

    rng = random.Random(2)
    longs = [tuple(rng.randrange(10, VOCAB) for _ in range(5 * SCORED_SLICE_TOKENS)) for _ in range(4)]
    prompt = (20,) if is_generating else 12 * longs[0]
    with EngineHarness(spec(model_folder("qwen3"), speculate="off", prefill_chunk=16)) as engine:
        monkeypatch.setattr(ScoredRows, "run", counted_run)
        monkeypatch.setattr(Generator, "run_passes", counted_step)
        stream = Generate(next(rids), TokensPrompt(prompt), Sampling(0.0, ignore_eos=True), 1500)
        other = engine.submit(stream)
        results = [engine.submit(scored(ids)) for ids in longs]
        are_all_sent.set()
        engine.wait(lambda: all(each.terminals for each in results))
        engine.command(Abort((stream.rid,)))
    assert not other.failure
    assert [len(each.logprobs) for each in results] == [5 * SCORED_SLICE_TOKENS + 1] * 4
    assert max(beside) == 1


def test_a_chunk_is_sized_for_one_of_the_prompts_that_are_scored_one_at_a_time(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    sized: list[tuple[int, int]] = []
    chunk = Pacer.chunk

    def noted(self: Pacer, prefilling: int, decoding: int, longest: int, context: int) -> ChunkPlan:
        sized.append((prefilling, decoding))
        return chunk(self, prefilling, decoding, longest, context)

    monkeypatch.setattr(Pacer, "chunk", noted)
    rng = random.Random(2)
    ids = tuple(rng.randrange(10, VOCAB) for _ in range(5 * SCORED_SLICE_TOKENS))
    with EngineHarness(spec(model_folder("qwen3"), speculate="off", prefill_chunk=8)) as engine:
        stream = engine.submit(Generate(next(rids), TokensPrompt((20,)), Sampling(0.0, ignore_eos=True), 1500))
        engine.wait(lambda: stream.ids)
        results = [engine.submit(scored(ids)) for _ in range(4)]
        results.append(engine.submit(Generate(next(rids), TokensPrompt(ids), Sampling(0.0), 1)))
        engine.wait(lambda: all(each.terminals for each in results))
        engine.command(Abort((next(iter(engine.results)),)))
    assert max(prefilling for prefilling, decoding in sized if decoding) == 2


def test_prompts_that_are_scored_one_at_a_time_take_turns() -> None:
    rows = ScoredRows(None)
    rows.rows = [SequenceGroup(), SequenceGroup(), SequenceGroup()]
    first, second, third = rows.rows
    turns = [rows.due(is_alone=False) for _ in range(4)]
    assert [[id(each) for each in turn] for turn in turns] == [[id(each)] for each in (first, second, third, first)]
    assert len(rows.due(is_alone=True)) == 3


def test_entries_of_a_prompt_are_made_as_its_scores_come_and_not_at_its_end(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    echo = LogprobReader.echo

    def counted(
        reader: LogprobReader, ids: Sequence[int], scores: Sequence[PromptScore], top: int
    ) -> list[TokenLogprob]:
        made.append(len(ids))
        return echo(reader, ids, scores, top)

    monkeypatch.setattr(LogprobReader, "echo", counted)
    rng = random.Random(2)
    ids = tuple(rng.randrange(10, VOCAB) for _ in range(8 * SCORED_SLICE_TOKENS))
    with EngineHarness(spec(model_folder("qwen3"))) as engine:
        result = engine.run([scored(ids, max_tokens=0)])[0]
    assert len(result.logprobs) == sum(made) == len(ids)
    assert max(made) <= SCORED_SLICE_TOKENS + 1


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text"])
def test_entries_of_a_prompt_have_the_ranks_of_one_pass_beside_an_echo_or_alone(
    architecture: str, model_folder: Callable[[str], Path]
) -> None:
    top = 3
    with EngineHarness(spec(model_folder(architecture), prefill_chunk=128)) as engine:
        requests = [structs.replace(scored(ids), echo=False, prompt_logprobs=top) for ids in prompts()]
        results = engine.run(requests)
        echoed = engine.run([structs.replace(each, rid=next(rids), echo=True) for each in requests])
        silent = engine.run([structs.replace(each, rid=next(rids), prompt_logprobs=0) for each in requests])
        references = [engine.loaded.model(mx.array([ids])) for ids in prompts()]
        mx.eval(references)
        said = engine.intake.vocabulary.token_bytes
    for ids, result, both, least, logits in zip(prompts(), results, echoed, silent, references, strict=True):
        assert both.prompt_logprobs[1:] == result.prompt_logprobs[1:]
        assert [(each.token, each.logprob) for each in both.logprobs[1 : len(ids)]] == [
            (each.token, each.logprob) for each in result.prompt_logprobs[1:]
        ]
        assert [(each.id, each.rank, each.top) for each in least.prompt_logprobs] == [
            (each.id, each.rank, ()) for each in result.prompt_logprobs
        ]
        assert [(each.id, each.token) for each in result.prompt_logprobs] == [(token, said(token)) for token in ids]
        first, *others = result.prompt_logprobs
        assert (math.isnan(first.logprob), first.rank, first.top) == (True, 0, ())
        reference: Any = (logits[0] - mx.logsumexp(logits[0], axis=-1, keepdims=True)).tolist()
        for at, entry in enumerate(others, 1):
            row = reference[at - 1]
            assert entry.logprob == pytest.approx(row[entry.id], abs=1e-4)
            assert sum(each > entry.logprob + 1e-4 for each in row) < entry.rank
            assert entry.rank <= 1 + sum(each > entry.logprob - 1e-4 for each in row)
            assert [value for _, _, value in entry.top] == pytest.approx(sorted(row)[: -top - 1 : -1], abs=1e-4)
            assert all(row[token] == pytest.approx(value, abs=1e-4) for token, _, value in entry.top)
        parts = [len(delta.prompt.logprobs) for delta in result.deltas if delta.prompt is not None]
        assert max(parts) <= SCORED_SLICE_TOKENS + 1


def test_a_successor_sends_the_entries_that_the_client_has_not_had(model_folder: Callable[[str], Path]) -> None:
    ids = prompts()[-1]
    with EngineHarness(spec(model_folder("qwen3"))) as engine:
        asked = structs.replace(scored(ids), echo=False, prompt_logprobs=2, prompt_ids=True)
        whole = engine.run([asked])[0]
        assert (whole.prompt_ids, len(whole.prompt_logprobs)) == (list(ids), len(ids))
        for had in (1, SCORED_SLICE_TOKENS + 5, len(ids)):
            again = structs.replace(asked, rid=next(rids), prompt_ids=False, prompt_scored=had)
            result = engine.run([again])[0]
            assert (result.prompt_ids, result.prompt_logprobs) == ([], whole.prompt_logprobs[had:])
            assert result.ids == whole.ids
        # Output began behind the last entry.
        begun = structs.replace(asked, rid=next(rids), max_tokens=4, resume=(20, 21), prompt_scored=len(ids))
        assert engine.run([begun])[0].prompt_logprobs == []


def test_a_row_that_is_scored_again_after_a_failed_tick_tells_no_entry_twice(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks: list[int] = []
    park = Batch._park  # pyright: ignore[reportPrivateUsage]

    def fail_once(batch: Batch) -> None:
        ticks.extend(len(rows.sequences[0].tokens) for rows in batch._generator._scored.rows)  # pyright: ignore[reportPrivateUsage]
        if sum(done > 0 for done in ticks) == 2:
            raise RuntimeError("[metal::malloc] Unable to allocate 5 bytes.")
        park(batch)

    ids = prompts()[-1]
    with EngineHarness(spec(model_folder("qwen3"))) as engine:
        asked = structs.replace(scored(ids), echo=False, prompt_logprobs=2)
        whole = engine.run([asked])[0]
        monkeypatch.setattr(Batch, "_park", fail_once)
        result = engine.run([structs.replace(asked, rid=next(rids))])[0]
    assert ticks.count(SCORED_SLICE_TOKENS) == 2, "it began again"
    assert result.prompt_logprobs[1:] == whole.prompt_logprobs[1:]
    assert (len(result.prompt_logprobs), result.ids) == (len(ids), whole.ids)


def test_entries_of_an_echo_are_sent_as_they_come_and_its_text_with_the_first(
    model_folder: Callable[[str], Path],
) -> None:
    ids = prompts()[-1]
    with EngineHarness(spec(model_folder("qwen3"))) as engine:
        whole = engine.run([scored(ids, max_tokens=0)])[0]
        text = engine.intake.vocabulary.decode(ids)
    parts = [delta for delta in whole.deltas if delta.logprobs]
    assert [len(delta.logprobs or ()) for delta in parts] == [1 + SCORED_SLICE_TOKENS, SCORED_SLICE_TOKENS, 2]
    assert [delta.text for delta in parts] == [text, "", ""]


def test_a_successor_sends_the_entries_of_an_echo_that_the_client_has_not_had(
    model_folder: Callable[[str], Path],
) -> None:
    ids = prompts()[-1]
    with EngineHarness(spec(model_folder("qwen3"))) as engine:
        asked = scored(ids, max_tokens=4)
        whole = engine.run([asked])[0]
        said = whole.text.removeprefix(engine.intake.vocabulary.decode(ids))
        assert len(said) < len(whole.text)
        for had in (1, SCORED_SLICE_TOKENS + 5, len(ids)):
            rest = engine.run([structs.replace(asked, rid=next(rids), echo_scored=had)])[0]
            assert (rest.text, rest.ids) == (said, whole.ids)
            assert [each.token for each in rest.logprobs] == [each.token for each in whole.logprobs[had:]]
        # Its output has begun.
        begun = structs.replace(asked, rid=next(rids), resume=tuple(whole.ids[:2]), echo_scored=len(ids))
        rest = engine.run([begun])[0]
        assert rest.ids == whole.ids[2:]
        assert whole.text.endswith(rest.text)
        assert len(rest.logprobs) == len(whole.logprobs) - len(ids) - 2


def test_a_row_that_is_scored_again_after_a_failed_tick_sends_no_entry_of_its_echo_twice(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[int] = []
    park = Batch._park  # pyright: ignore[reportPrivateUsage]

    def fail_once(batch: Batch) -> None:
        runs.extend(len(rows.sequences[0].tokens) for rows in batch._generator._scored.rows)  # pyright: ignore[reportPrivateUsage]
        if sum(done > 0 for done in runs) == 2:
            raise RuntimeError("[metal::malloc] Unable to allocate 5 bytes.")
        park(batch)

    ids = prompts()[-1]
    with EngineHarness(spec(model_folder("qwen3"))) as engine:
        whole = engine.run([scored(ids)])[0]
        monkeypatch.setattr(Batch, "_park", fail_once)
        again = engine.run([scored(ids)])[0]
    assert runs.count(SCORED_SLICE_TOKENS) == 2, "it began again"
    assert (again.text, len(again.logprobs), again.ids) == (whole.text, len(whole.logprobs), whole.ids)


def test_a_prompt_of_the_whole_context_is_scored_where_nothing_is_generated(
    model_folder: Callable[[str], Path],
) -> None:
    rng = random.Random(5)
    whole, longer = (TokensPrompt(tuple(rng.randrange(10, VOCAB) for _ in range(size))) for size in (256, 257))
    with (
        EngineHarness(spec(model_folder("qwen3"), context=256)) as engine,
        EngineHarness(spec(model_folder("qwen3"), context=1024)) as roomy,
    ):
        asked = structs.replace(scored(whole.ids, max_tokens=0), rid=next(rids))
        alone, other = engine.run([asked])[0], roomy.run([structs.replace(asked, rid=next(rids))])[0]
        filled = engine.run([Generate(next(rids), whole, Sampling(), max_tokens=0)])[0]
        asking = [
            Generate(next(rids), whole, Sampling(), max_tokens=1),
            Generate(next(rids), whole, Sampling(), max_tokens=None, echo=True),
            structs.replace(scored(longer.ids, max_tokens=0), rid=next(rids)),
        ]
        refused = engine.run(asking)
    assert len(alone.logprobs) == 256
    assert entries(alone) == entries(other)
    assert (filled.finish, filled.ids) == (Finish.LENGTH, [])
    assert [each.failure is not None and each.failure.code for each in refused] == [Code.CONTEXT_LENGTH_EXCEEDED] * 3
