"""Chunks of prompts fused into the steps of rows that generate: one forward pass a tick, and the same tokens."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from msgspec import structs

from protocol.to_worker import Abort, Constraint, ConstraintKind, Generate, Sampling, TokensPrompt
from tests.support.engine import EngineHarness, Result, spec
from tests.support.models import KINDS, SAMPLE, VOCAB
from tests.support.scale import scaled
from tests.worker.engine.test_exact import tokens
from worker.engine.batch import Batch
from worker.engine.scheduling.pacing import PassTime
from worker.kv import ragged
from worker.kv.spans_and_checkpoints import KvLayout
from worker.model.loader import LoadedModel, load
from worker.model.packing import PackedRows
from worker.prefix_cache.cache_and_eviction import PrefixCache
from worker.prompt.intake import Intake
from worker.speculation.drafter import Drafter
from worker.tools.verify.verifier import NoisyDrafts

LENGTHS = (5, 70, 33, 100, 12)


class Watched:
    """A model that keeps the shapes of the passes in which prompts are fused into a step."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.packed: list[tuple[int, ...]] = []

    def __call__(self, inputs: mx.array, *args: Any, cache: Any = None, **kwargs: Any) -> mx.array:
        if isinstance(cache[0], PackedRows):
            self.packed.append(tuple(inputs.shape))
        return self._model(inputs, *args, cache=cache, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def requests(output: int = 16) -> list[Generate]:
    rng = random.Random(3)
    return [
        Generate(
            rid,
            TokensPrompt(tuple(rng.randrange(10, VOCAB) for _ in range(length))),
            Sampling(temperature=float(rid % 2), seed=rid, ignore_eos=True),
            max_tokens=output,
        )
        for rid, length in enumerate(LENGTHS)
    ]


def generated(
    loaded: LoadedModel,
    batch: list[Generate],
    *,
    chunk: int = 16,
    is_fused: bool = True,
    drafter: Drafter | None = None,
    times: list[PassTime] | None = None,
) -> tuple[dict[int, list[int]], int]:
    """Each row's tokens, where one row comes every third tick; and the packed passes. Their times go to `times`."""
    watched = Watched(loaded.model)
    rows = Batch(watched, (), PrefixCache(KvLayout.of(lambda: make_prompt_cache(watched)), 0), drafter=drafter)
    waiting = [Intake(loaded).row(request, 0.0) for request in batch]
    said: dict[int, list[int]] = {request.rid: [] for request in batch}
    ticks = 0
    while waiting or rows:
        if waiting and ticks % 3 == 0:
            rows.insert(waiting.pop(0))
        ticks += 1
        step = rows.step(chunk, is_fused=is_fused)
        for token in step.tokens:
            said[token.row.rid].append(token.id)
        if times is not None:
            times += step.timed
    rows.close()
    return said, len(watched.packed)


@pytest.mark.parametrize("architecture", SAMPLE)
def test_decoding_rows_and_prompts_fused_into_their_steps_keep_their_tokens(
    architecture: str, model_folder: Callable[[str], Path]
) -> None:
    loaded, batch = load(spec(model_folder(architecture)), lambda *_: None), requests()
    alone: dict[int, list[int]] = {}
    drafter = NoisyDrafts(VOCAB)
    for request in batch:
        alone |= generated(loaded, [request], chunk=512)[0]
        assert isinstance(request.prompt, TokensPrompt)
        drafter.learn([*request.prompt.ids, *alone[request.rid]])
    fused, packed = generated(loaded, batch)
    assert fused == alone
    assert packed > 10
    assert generated(loaded, batch, is_fused=False) == (alone, 0)
    drafted, packed = generated(loaded, batch, drafter=drafter)
    assert drafted == alone
    assert packed > 5
    assert 0 < drafter.accepted < drafter.drafted


@pytest.mark.soak
@pytest.mark.parametrize("architecture", KINDS)
def test_where_attention_sees_all_of_the_room_rows_keep_their_tokens(
    architecture: str, model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There rows of unequal length may also have a second token, which is given back, and widths are powers of two."""
    loaded, batch = load(spec(model_folder(architecture)), lambda *_: None), requests()
    alone = generated(loaded, batch)[0]
    monkeypatch.setattr(ragged, "sees_room", True)
    drafter = NoisyDrafts(VOCAB)
    for request in batch:
        assert isinstance(request.prompt, TokensPrompt)
        drafter.learn([*request.prompt.ids, *alone[request.rid]])
    assert generated(loaded, batch)[0] == alone
    assert generated(loaded, batch, drafter=drafter)[0] == alone
    assert drafter.accepted > 0


def test_a_tick_with_a_prompt_is_one_pass_of_its_tokens_and_one_of_each_row(
    model_folder: Callable[[str], Path],
) -> None:
    loaded = load(spec(model_folder("qwen3")), lambda *_: None)
    watched = Watched(loaded.model)
    batch = Batch(watched, (), PrefixCache(KvLayout.of(lambda: make_prompt_cache(watched)), 0))
    rows = [Intake(loaded).row(request, 0.0) for request in requests()]
    for row in rows[:2]:
        batch.insert(row)
    for _ in range(3):
        batch.step(512)
    batch.insert(rows[3])
    ticks = [batch.step(64) for _ in range(3)]
    assert watched.packed == [(1, 2 + 64), (1, 2 + 35)]
    assert [tick.prefilled for tick in ticks] == [64, 35, 1]
    # What a step took is known once the next one has read its tokens.
    assert [[(each.prompted, each.rows) for each in tick.timed] for tick in ticks[1:]] == [[(64, 2)], [(35, 2)]]
    batch.close()


@pytest.mark.parametrize("is_fused", [True, False])
def test_each_pass_is_timed_once_with_its_rows_width_and_tokens(
    model_folder: Callable[[str], Path], *, is_fused: bool
) -> None:
    loaded, batch = load(spec(model_folder("qwen3")), lambda *_: None), requests(output=24)
    plain: list[PassTime] = []
    said = generated(loaded, batch, is_fused=is_fused, times=plain)[0]
    drafter, drafted = NoisyDrafts(VOCAB), list[PassTime]()
    for request in batch:
        assert isinstance(request.prompt, TokensPrompt)
        drafter.learn([*request.prompt.ids, *said[request.rid]])
    assert generated(loaded, batch, is_fused=is_fused, drafter=drafter, times=drafted)[0] == said
    for times in (plain, drafted):
        assert all(each.seconds > 0 for each in times)
        prompted = sum(each.prompted for each in times)
        assert prompted == sum(LENGTHS) - len(LENGTHS), "the last token of each runs with the rows that generate"
        # The plain step that was launched last is read by nobody.
        assert sum(map(len, said.values())) <= sum(each.tokens for each in times) + max(each.rows for each in times)
        assert {each.prompted > 0 for each in times if each.rows} == ({False, True} if is_fused else {False})
    assert {(each.width > 1, each.prompted > 0) for each in drafted if each.rows} >= {(True, False), (False, False)}
    assert not is_fused or any(each.width > 1 and each.prompted for each in drafted)


@pytest.mark.parametrize("architecture", scaled(KINDS, ["gemma3_text"]))
def test_grammars_penalties_and_logprobs_are_right_beside_fused_prompts_that_come_and_go(
    architecture: str, model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.engine.scheduling.pacing._MARGIN", 0.0)  # whichever way is quicker here
    batch = [structs.replace(request, top_logprobs=2) for request in requests(output=30)]
    batch[0] = structs.replace(batch[0], constraint=Constraint(ConstraintKind.REGEX, "[a-z ]+"))
    batch[1] = structs.replace(batch[1], sampling=structs.replace(batch[1].sampling, repetition_penalty=1.3))
    leaving = structs.replace(batch[3], rid=9)
    with EngineHarness(spec(model_folder(architecture), prefill_chunk=8, cache_bytes=0), wrap=Watched) as engine:
        alone = [engine.run([request])[0] for request in batch]
        engine.loaded.model.packed.clear()
        results: list[Result] = []
        for request in (*batch[:2], leaving, *batch[2:]):
            results.append(engine.submit(request))
            engine.wait(lambda: results[0].ids, "a row that generates")
            if len(results) == 4:
                engine.command(Abort((leaving.rid,)))
        engine.wait(lambda: all(result.terminals for result in results))
        assert len(engine.loaded.model.packed) > 5
    del results[2]
    assert [tokens(result) for result in results] == [tokens(result) for result in alone]
    for result, other in zip(results, alone, strict=True):
        assert [entry.logprob for entry in result.logprobs] == pytest.approx(
            [entry.logprob for entry in other.logprobs], abs=1e-4
        )
