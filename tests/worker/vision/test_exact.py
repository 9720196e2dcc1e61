"""Rows with media have the same tokens alone, batched beside text, chunked, from caches, resumed and preempted."""

import random
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from protocol.spec import WorkerSpec
from tests.support import vision_models
from tests.support.media_engine import MediaRequest, media_request, run
from tests.support.scale import scaled
from tests.support.small_towers import small_towers
from tests.support.vision_models import FAMILIES, image, prompt, sound, video
from worker.engine.scheduling import kv_budget
from worker.model.loader import LoadedModel, load
from worker.tools.verify.verifier import NoisyDrafts, VerifiedOutput
from worker.vision.multimodal_merge import MultimodalMerge

SPEC = WorkerSpec("m", "", 1, "", "", cache_bytes=0, kv_bytes=1 << 30)
CACHED = replace(SPEC, cache_bytes=1 << 28)
# Text before the image of the first request, which others share.
SHARED = 40
# Sliding windows add in another order when rows are longer.
TOLERANCE = 1e-4


@dataclass
class Model:
    """One family with its requests, and what each of them says alone."""

    family: str
    loaded: LoadedModel
    requests: list[MediaRequest]
    alone: list[VerifiedOutput]

    def check(self, outputs: Sequence[VerifiedOutput]) -> None:
        for output, alone in zip(outputs, self.alone, strict=True):
            assert output.failure is None
            assert output.ids == alone.ids
            pairs = zip(reversed(output.logprobs), reversed(alone.logprobs), strict=False)
            assert max((abs(one.logprob - two.logprob) for one, two in pairs), default=0.0) < TOLERANCE


@pytest.fixture(scope="module", params=scaled(tuple(FAMILIES), ("qwen3_vl",)))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    family: str = request.param
    with small_towers():
        path = vision_models.build(family, tmp_path_factory.mktemp(family))
        loaded = load(replace(SPEC, path=str(path)), lambda *_: None)
    assert loaded.vision is not None, loaded.no_vision
    rng = np.random.default_rng(3)
    if family == "gemma3n":  # of whose images each is 257 tokens
        first, other, third = (sound(family, rng, tokens) for tokens in (16, 16, 13))
    else:
        first, other, third = (image(family, rng, height, width) for height, width in ((4, 4), (4, 4), (4, 6)))
    parts: list[Any] = [[SHARED, first, 37], [SHARED, first, 39], [33], [4, third, 60, other, 13], [first, 3]]
    if family.startswith("qwen"):
        parts.append([3, other, 3, video(rng, 4, 4, 4), 9])
    if family.startswith("gemma4"):
        parts.append([3, other, 3, sound(family, rng, 7), 9, sound(family, rng, 2), 30])
    # The same text as the first, another image.
    parts.append([SHARED, other, 37])
    seeds = [0 if part[0] == SHARED else at for at, part in enumerate(parts)]
    requests = [
        media_request(at + 1, prompt(family, seed, part), is_sampled=at % 2 == 1, tokens=8)
        for at, (seed, part) in enumerate(zip(seeds, parts, strict=True))
    ]
    alone, _ = run(loaded, SPEC, [[each] for each in requests])
    assert all(output.failure is None for output in alone)
    return Model(family, loaded, requests, alone)


def test_another_image_in_the_same_text_has_another_answer(model: Model) -> None:
    assert model.alone[0].logprobs[0].logprob != model.alone[-1].logprobs[0].logprob


def test_rows_in_one_batch_and_in_small_chunks_are_as_alone(model: Model) -> None:
    outputs, session = run(model.loaded, SPEC, [model.requests])
    model.check(outputs)
    distinct = {span.medium.key for each in model.requests for span in each.prompt.media}
    assert session.features.counts.media_encoded == len(distinct)
    model.check(run(model.loaded, replace(SPEC, prefill_chunk=8), [model.requests])[0])


def test_a_second_wave_from_memory_encodes_nothing(model: Model) -> None:
    _, first = run(model.loaded, CACHED, [model.requests])
    outputs, session = run(model.loaded, CACHED, [model.requests, model.requests])
    model.check(outputs)
    assert session.features.counts.media_encoded == first.features.counts.media_encoded
    assert session.features.counts.media_decoded == first.features.counts.media_decoded
    assert all(output.cached for output in outputs)


def test_rows_from_disk_are_as_alone(model: Model, tmp_path: Path) -> None:
    spec = replace(CACHED, disk_cache_dir=str(tmp_path), disk_cache_bytes=1 << 30, disk_cache_tokens=16)
    _, cold = run(model.loaded, spec, [model.requests])
    outputs, session = run(model.loaded, spec, [model.requests])
    model.check(outputs)
    assert outputs[0].cached > SHARED
    assert session.features.counts.media_encoded < cold.features.counts.media_encoded


def test_rows_with_drafts_are_as_alone(model: Model) -> None:
    drafter = NoisyDrafts(model.loaded.vocab_size)
    for each, alone in zip(model.requests, model.alone, strict=True):
        drafter.learn([*each.prompt.ids, *alone.ids])
    outputs, _ = run(model.loaded, SPEC, [model.requests], drafter=drafter)
    assert drafter.drafted
    model.check(outputs)


def test_resumed_rows_go_on_as_alone(model: Model) -> None:
    rng = random.Random(1)
    given = {each.request.rid: tuple(alone.ids[: rng.randrange(1, len(alone.ids))])
             for each, alone in zip(model.requests, model.alone, strict=True)}  # fmt: skip
    outputs, _ = run(model.loaded, SPEC, [model.requests], resumes=given)
    for each, output in zip(model.requests, outputs, strict=True):
        output.ids = [*given[each.request.rid], *output.ids]
    model.check(outputs)


@contextmanager
def small_steps(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """Rows of a tiny model outgrow what admission counts on."""
    with monkeypatch.context() as patch:
        patch.setattr(kv_budget, "STEP", 8)
        patch.setattr(kv_budget, "RESERVED_OUTPUT_TOKENS", 1)
        yield


@pytest.mark.soak
def test_preempted_rows_are_as_alone(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    # Three rows outgrow what four are admitted with, also where most layers have a window.
    tokens = 60 if model.family == "gemma4_unified" else 30
    crowd = [
        media_request(rid, replace_text(model, rid), is_sampled=rid % 2 == 0, tokens=tokens) for rid in range(1, 5)
    ]
    alone, session = run(model.loaded, SPEC, [[each] for each in crowd])
    with small_steps(monkeypatch):
        limit = session.kv_cost.bytes(4, len(crowd[0].prompt.ids) + 12)
        for spec in (SPEC, CACHED):
            outputs, squeezed = run(model.loaded, replace(spec, kv_bytes=limit), [crowd])
            assert [output.ids for output in outputs] == [output.ids for output in alone]
            assert squeezed.gauges.preemptions > 0


def replace_text(model: Model, rid: int) -> Any:
    medium = model.requests[0].prompt.media[0].medium
    return prompt(model.family, 100 + rid, [20, medium, 12])


def test_of_another_image_in_the_same_text_nothing_is_reused(model: Model) -> None:
    outputs, _ = run(model.loaded, CACHED, [[model.requests[0]], [model.requests[-1]]])
    assert outputs[1].ids == model.alone[-1].ids
    needs_checkpoints = model.family in (
        "qwen3_5",
        "qwen3_5_moe",
        "gemma3",
        "gemma3n",
        "gemma4",
        "gemma4_unified",
        "lfm2_vl",
    )
    assert outputs[1].cached == (0 if needs_checkpoints else SHARED)


@pytest.mark.parametrize("field", ["delta", "chunk"])
def test_without_a_merge_the_tokens_differ(model: Model, field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if field == "delta" and not model.family.startswith("qwen"):
        pytest.skip("positions of this family are those of text")
    with monkeypatch.context() as patch:
        patch.setattr(MultimodalMerge, field, property(lambda _: None, lambda _, value: None), raising=False)
        outputs, _ = run(model.loaded, SPEC, [model.requests])
    media_rows = [at for at, each in enumerate(model.requests) if each.prompt.media]
    differing = [at for at in media_rows if outputs[at].logprobs[0].logprob != model.alone[at].logprobs[0].logprob]
    assert len(differing) > len(media_rows) // 2
