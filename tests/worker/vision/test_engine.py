"""Rows with media in a running engine: what fails fails alone, what is known is not made again."""

import threading
import time
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from protocol.failures import Code
from protocol.from_worker import Finish
from protocol.to_worker import Abort, Constraint, ConstraintKind, Generate, Sampling, TokensPrompt
from tests.support.engine import EngineHarness, Result, spec
from tests.support.scale import patient
from tests.support.vision_models import GridMedium, MediaPrompt, build, image, prompt
from worker.engine.batch import Batch
from worker.engine.row import Row
from worker.errors import RequestInvalid
from worker.kv.spans_and_checkpoints import KvLayout
from worker.model.loader import load
from worker.output.parsers.parser import make_parser
from worker.prefix_cache.cache_and_eviction import PrefixCache
from worker.prompt.intake import Intake
from worker.vision.encoder import FeatureCache, MediaEncoder
from worker.vision.media import Medium

FAMILY = "qwen3_vl"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(FAMILY, tmp_path_factory.mktemp(FAMILY))


@pytest.fixture
def engine(folder: Path) -> Generator[EngineHarness]:
    with EngineHarness(spec(folder, cache_bytes=1 << 28, batching="together")) as harness:
        yield harness


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


def nothing(_stage: str, _done_bytes: int, _total_bytes: int) -> None:
    pass


def row(engine: EngineHarness, rid: int, asked: MediaPrompt, tokens: int = 8) -> Row:
    sampling = Sampling(temperature=0.0, ignore_eos=True)
    made = engine.intake.row(Generate(rid, TokensPrompt(tuple(asked.ids)), sampling, tokens), time.monotonic())
    made.media, made.positions = asked.media, asked.positions
    engine.results[rid] = Result()
    return made


def ask(engine: EngineHarness, rid: int, asked: MediaPrompt, tokens: int = 8) -> Result:
    return engine.submit_row(row(engine, rid, asked, tokens))


def finish(engine: EngineHarness, *results: Result) -> None:
    engine.wait(lambda: all(result.terminals for result in results), "all terminal events")


def features(engine: EngineHarness) -> FeatureCache:
    cache = engine.engine.features
    assert cache is not None
    return cache


class Gate:
    """A medium whose decoding waits, so that a test can act meanwhile."""

    def __init__(self, medium: Medium, error: Exception | None = None) -> None:
        self.has_begun = threading.Event()
        self.may_end = threading.Event()
        load = medium.load

        def wait() -> Any:
            self.has_begun.set()
            assert self.may_end.wait(patient(30))
            if error is not None:
                raise error
            return load()

        self.medium = replace(medium, load=wait)


def broken(medium: Medium) -> Medium:
    """A medium of which the tower makes another number of rows than the prompt has places for."""
    assert isinstance(medium, GridMedium)
    return replace(medium, key=bytes(32), grid=(1, 4, 8), tokens=2 * medium.tokens)


def test_text_goes_on_while_an_image_is_decoded(engine: EngineHarness, rng: np.random.Generator) -> None:
    gate = Gate(image(FAMILY, rng, 4, 4))
    pictured = ask(engine, 1, prompt(FAMILY, 1, [9, gate.medium, 7]))
    assert gate.has_begun.wait(patient(30))
    text = ask(engine, 2, prompt(FAMILY, 2, [30]))
    finish(engine, text)
    assert pictured.terminals == 0
    gate.may_end.set()
    finish(engine, pictured)
    assert len(pictured.ids) == 8
    assert pictured.usage is not None
    assert (pictured.usage.image_tokens, pictured.usage.video_tokens) == (4, 0)


def test_a_tower_that_raises_ends_its_row_alone(engine: EngineHarness, rng: np.random.Generator) -> None:
    picture = image(FAMILY, rng, 4, 4)
    alone = ask(engine, 1, prompt(FAMILY, 1, [9, picture, 7]))
    finish(engine, alone)
    results = [
        ask(engine, 2, prompt(FAMILY, 2, [9, broken(picture), 7])),
        ask(engine, 3, prompt(FAMILY, 1, [9, picture, 7])),
        ask(engine, 4, prompt(FAMILY, 4, [30])),
    ]
    finish(engine, *results)
    assert [result.finish for result in results] == [Finish.ERROR, Finish.LENGTH, Finish.LENGTH]
    assert results[0].failure is not None
    assert results[0].failure.code is Code.ROW_FAILED
    assert results[0].failure.message == "the request failed while its media were encoded"
    assert results[1].ids == alone.ids
    assert features(engine).counts.media_failed == 1
    assert features(engine).held_bytes == 0


def test_bytes_that_cannot_be_decoded_are_the_refusal_of_their_request(
    engine: EngineHarness, rng: np.random.Generator
) -> None:
    refusal = RequestInvalid(Code.INVALID_IMAGE, "The image is truncated.", param="messages[0].content[1]")
    gate = Gate(image(FAMILY, rng, 4, 4), refusal)
    gate.may_end.set()
    result = ask(engine, 1, prompt(FAMILY, 1, [9, gate.medium, 7]))
    finish(engine, result)
    assert result.failure == refusal.failure


def test_two_rows_with_one_broken_image_are_each_told_by_their_own_name(
    engine: EngineHarness, rng: np.random.Generator
) -> None:
    picture = image(FAMILY, rng, 4, 4)
    gates = [
        Gate(picture, RequestInvalid(Code.INVALID_IMAGE, "The image is truncated.", param=f"messages[{at}]"))
        for at in range(2)
    ]
    results = [ask(engine, at, prompt(FAMILY, at, [9, gate.medium, 7])) for at, gate in enumerate(gates)]
    for gate in gates:
        gate.may_end.set()
    finish(engine, *results)
    assert [result.failure.param for result in results if result.failure] == ["messages[0]", "messages[1]"]


def test_an_abort_while_decoding_and_one_while_prefilling_leave_nothing(folder: Path, rng: np.random.Generator) -> None:
    with EngineHarness(spec(folder, cache_bytes=1 << 28, batching="together", prefill_chunk=8)) as engine:
        gate = Gate(image(FAMILY, rng, 4, 4))
        decoding = ask(engine, 1, prompt(FAMILY, 1, [9, gate.medium, 7]))
        assert gate.has_begun.wait(patient(30))
        engine.command(Abort((1,)))
        finish(engine, decoding)
        gate.may_end.set()
        made = row(engine, 2, prompt(FAMILY, 2, [600, image(FAMILY, rng, 8, 8), 1800, image(FAMILY, rng, 4, 4), 9]))
        made.want_progress = True
        prefilling = engine.submit_row(made)
        engine.wait(lambda: len(prefilling.progress) > 2, "some chunks")
        engine.command(Abort((2,)))
        finish(engine, prefilling)
        assert (decoding.finish, prefilling.finish) == (Finish.ABORT, Finish.ABORT)
        later = ask(engine, 3, prompt(FAMILY, 3, [20]))
        finish(engine, later)
        assert features(engine).held_bytes == 0


def test_rows_whose_masks_are_late_leave_no_placement_behind(
    engine: EngineHarness, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.structured.masks.MAX_PATIENCE_S", 0.0)
    parked: list[int] = []
    park = Batch._park  # pyright: ignore[reportPrivateUsage]

    def counting(self: Batch) -> None:
        park(self)
        parked.append(len(self._parked))  # pyright: ignore[reportPrivateUsage]

    monkeypatch.setattr(Batch, "_park", counting)
    made = row(engine, 1, prompt(FAMILY, 1, [9, image(FAMILY, rng, 4, 4), 7]))
    engine.intake.rules.constrain(made, Constraint(ConstraintKind.REGEX, "([a-z]{2,5} ){30}"))
    finish(engine, engine.submit_row(made))
    assert any(parked)
    assert features(engine).held_bytes == 0
    assert made.sequence is None


def witnessed(medium: Medium, threads: list[str]) -> Medium:
    """A medium that tells on which threads it was decoded."""

    def load() -> Any:
        threads.append(threading.current_thread().name)
        return medium.load()

    return replace(medium, load=load)


def test_a_row_that_comes_back_without_kv_and_features_waits_for_its_media_as_any_other(
    folder: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose mask was late, and one whose reasoning is closed: nothing is kept of either, nor of their images."""
    monkeypatch.setattr("worker.structured.masks.MAX_PATIENCE_S", 0.0)
    threads: list[str] = []
    asked = prompt(FAMILY, 1, [9, witnessed(image(FAMILY, rng, 4, 4), threads), 7])
    with EngineHarness(spec(folder, cache_bytes=0, batching="together")) as engine:
        masked = row(engine, 1, asked)
        engine.intake.rules.constrain(masked, Constraint(ConstraintKind.REGEX, "[a-z]{9}"))
        finish(engine, engine.submit_row(masked))
        assert len(threads) > 1
        decoded = len(threads)
        thinker = row(engine, 2, asked)
        thinker.text.parser, thinker.thinking.is_open = make_parser("qwen3", start_in_reasoning=True), True
        thinker.thinking.budget, thinker.thinking.closing_ids = 3, (40, 41)
        result = engine.submit_row(thinker)
        finish(engine, result)
        assert result.finish is Finish.LENGTH
        assert result.ids[3:5] == [40, 41]
        assert len(threads) == decoded + 2
        assert features(engine).nbytes == 0
    assert all(name.startswith("pixels") for name in threads)


@pytest.mark.soak
def test_a_burst_of_rows_with_many_images_stays_within_the_bytes_for_features(
    folder: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    put = FeatureCache.put

    def recording(self: FeatureCache, *args: Any) -> None:
        put(self, *args)
        held.append(self.held_bytes)

    monkeypatch.setattr(FeatureCache, "put", recording)
    asked = [prompt(FAMILY, rid, [9, *(image(FAMILY, rng, 4, 4) for _ in range(3)), 7]) for rid in range(12)]
    with EngineHarness(spec(folder, cache_bytes=0, batching="together")) as engine:
        alone = [ask(engine, rid, each, tokens=4) for rid, each in enumerate(asked[:4])]
        finish(engine, *alone)
        one_row = max(held)
        cache = features(engine)
        cache._held_min = 2 * one_row  # pyright: ignore[reportPrivateUsage]
        held.clear()
        results = [ask(engine, 100 + rid, each, tokens=4) for rid, each in enumerate(asked)]
        finish(engine, *results)
        assert max(held) <= 3 * one_row
        assert [result.ids for result in results[:4]] == [result.ids for result in alone]
        assert all(len(result.ids) == 4 for result in results)
        assert cache.held_bytes == 0


def test_a_medium_that_finds_no_memory_is_made_once_more_from_what_caches_give_back(
    engine: EngineHarness, rng: np.random.Generator
) -> None:
    picture = image(FAMILY, rng, 4, 4)
    alone = [ask(engine, 1, prompt(FAMILY, 1, [9, picture, 7])), ask(engine, 2, prompt(FAMILY, 2, [40]), tokens=60)]
    finish(engine, *alone)
    failures = [MemoryError()]

    def load() -> Any:
        if failures:
            raise failures.pop()
        return picture.load()

    again = replace(picture, key=bytes(32), load=load)
    results = [ask(engine, 4, prompt(FAMILY, 2, [40]), tokens=60), ask(engine, 3, prompt(FAMILY, 1, [9, again, 7]))]
    finish(engine, *results)
    assert [result.ids for result in results[::-1]] == [result.ids for result in alone]
    assert engine.gauges.allocation_failures == 1
    assert len(engine.engine.cache) <= 2, "what was cached before was let go of"


def test_turns_of_a_chat_with_ten_screenshots_decode_and_encode_only_what_is_new(
    engine: EngineHarness, rng: np.random.Generator
) -> None:
    parts: list[Any] = []
    asked: MediaPrompt | None = None
    for turn in range(10):
        parts += [12, image(FAMILY, rng, 4, 4), 6]
        asked = prompt(FAMILY, 5, parts)
        result = ask(engine, turn + 1, asked, tokens=2)
        finish(engine, result)
        assert features(engine).counts.media_encoded == features(engine).counts.media_decoded == turn + 1
    assert asked is not None
    again = ask(engine, 20, prompt(FAMILY, 5, [*parts, 30]))
    finish(engine, again)
    assert again.usage is not None
    assert again.usage.cached >= len(asked.ids) - 1
    assert features(engine).counts.media_encoded == features(engine).counts.media_decoded == 10
    assert features(engine).counts.feature_hits == 0, "what the prefix cache holds needs no features"


def test_the_same_image_under_another_text_is_a_hit(engine: EngineHarness, rng: np.random.Generator) -> None:
    picture = image(FAMILY, rng, 4, 4)
    for rid, seed in enumerate((1, 2, 3), start=1):
        finish(engine, ask(engine, rid, prompt(FAMILY, seed, [9, picture, 7])))
    counts = features(engine).counts
    assert (counts.media_encoded, counts.media_decoded, counts.feature_misses, counts.feature_hits) == (1, 1, 1, 2)
    assert engine.gauges.snapshot().media_encoded == 1


def test_two_rows_that_come_together_encode_their_image_once(engine: EngineHarness, rng: np.random.Generator) -> None:
    gate = Gate(image(FAMILY, rng, 4, 4))
    results = [ask(engine, rid, prompt(FAMILY, rid, [9, gate.medium, 7])) for rid in (1, 2)]
    assert gate.has_begun.wait(patient(30))
    gate.may_end.set()
    finish(engine, *results)
    assert features(engine).counts.media_encoded == features(engine).counts.media_decoded == 1


def test_no_part_of_an_image_is_reused_when_a_cached_prefix_ends_inside(folder: Path, rng: np.random.Generator) -> None:
    picture = image(FAMILY, rng, 16, 16)  # 64 tokens
    first, second = (prompt(FAMILY, 1, [80, picture, *rest]) for rest in ([4], [40]))
    with EngineHarness(spec(folder, cache_bytes=0, batching="together")) as engine:
        expected = ask(engine, 1, second)
        finish(engine, expected)
        token_bytes = engine.kv_cost.token_bytes + 4
    # Room for the text, and half of the image; the rest of the share is for features.
    for tokens in (100, 112, 130):
        with EngineHarness(spec(folder, cache_bytes=2 * tokens * token_bytes, batching="together")) as engine:
            finish(engine, ask(engine, 1, first))
            keys, deadline = row(engine, 9, first).keys(), time.monotonic() + patient(10)
            while not (held := engine.engine.cache.longest(keys)):  # it is stored after the answer
                assert time.monotonic() < deadline
            assert 80 < held < 80 + 64
            result = ask(engine, 2, second)
            finish(engine, result)
            assert result.usage is not None
            assert result.usage.cached == 80
            assert result.ids == expected.ids


def test_features_are_within_the_share_of_prefixes(folder: Path) -> None:
    with EngineHarness(spec(folder, cache_bytes=1 << 20, batching="together")) as engine:
        assert engine.engine.cache.budget + features(engine).budget == 1 << 20
        assert features(engine).budget == 1 << 19


def test_placeholders_are_never_drawn(engine: EngineHarness) -> None:
    assert engine.loaded.vision is not None
    suppressed = engine.loaded.vision.needs.suppressed
    assert {600, 601, 603, 604} <= set(suppressed)
    likely = dict.fromkeys(suppressed, 100.0) | {42: 50.0}
    for temperature, rid in ((0.0, 1), (1.0, 2)):
        sampling = Sampling(temperature=temperature, ignore_eos=True, logit_bias=likely)
        result = engine.submit(Generate(rid, TokensPrompt((9, 10, 11)), sampling, 8))
        finish(engine, result)
        assert result.ids == [42] * 8


def test_an_abort_inside_an_image_leaves_the_checkpoints_before_it(tmp_path: Path, rng: np.random.Generator) -> None:
    loaded = load(spec(build("qwen3_5", tmp_path / "m")), nothing)
    assert loaded.vision is not None
    cache = PrefixCache(KvLayout.of(lambda: make_prompt_cache(loaded.model)), 1 << 28)
    encoder = MediaEncoder(loaded.vision.tower, FeatureCache(1 << 24), lambda: None)
    batch = Batch(loaded.model, loaded.eos_ids, cache, vision=loaded.vision, encoder=encoder)
    asked = prompt("qwen3_5", 1, [80, image("qwen3_5", rng, 16, 16), 20])

    def insert(rid: int) -> Row:
        made = Intake(loaded).row(Generate(rid, TokensPrompt(tuple(asked.ids)), Sampling(), 4), 0.0)
        made.media, made.positions, made.boundaries = asked.media, asked.positions, [40]
        deadline = time.monotonic() + patient(10)
        while not batch.insert(made):
            assert time.monotonic() < deadline
            encoder.step()
        return made

    first = insert(1)
    sequence = first.sequence
    assert sequence is not None
    while sequence.prefilled <= 96:
        batch.step(24)
    assert 80 < sequence.prefilled < 144
    batch.remove(first)
    assert insert(2).stats.cached == 40
    batch.close()
    encoder.close()
