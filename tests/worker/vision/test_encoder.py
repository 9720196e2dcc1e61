"""Jobs of the encoder: what rows wait for is made once, and nothing is made or held for those that wait no more."""

import time
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest

from tests.support.engine import spec
from tests.support.scale import patient
from tests.support.vision_models import build, image
from worker.model.loader import load
from worker.vision.encoder import Encoder
from worker.vision.features import FeatureCache
from worker.vision.media import Medium
from worker.vision.tower import Tower

FAMILY = "qwen3_vl"


def nothing(_stage: str, _done_bytes: int, _total_bytes: int) -> None:
    pass


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> Tower:
    folder: Path = build(FAMILY, tmp_path_factory.mktemp(FAMILY))
    vision = load(spec(folder), nothing).vision
    assert vision is not None
    return vision.tower


@pytest.fixture
def encoder(tower: Tower) -> Generator[Encoder]:
    made = Encoder(tower, FeatureCache(1 << 24), lambda: None)
    yield made
    made.features.check()
    made.close()


def pictures(count: int) -> list[Medium]:
    rng = np.random.default_rng(7)
    return [image(FAMILY, rng, 4, 4) for _ in range(count)]


def step(encoder: Encoder) -> None:
    """One step, with pixels if there is a job."""
    deadline = time.monotonic() + patient(10)
    while not encoder.has_pixels and time.monotonic() < deadline:
        time.sleep(0.001)
    assert encoder.step() == []


def test_a_medium_made_at_once_for_one_row_is_there_for_those_that_wait_for_it(encoder: Encoder) -> None:
    (picture,) = pictures(1)
    assert not encoder.is_ready(2, [picture])
    encoder.get(1, picture)
    assert encoder.step() == []
    assert encoder.features.holds(2, picture.key)
    assert encoder.is_ready(2, [picture])
    assert encoder.features.counts.encoded == 1
    for rid in (1, 2):
        encoder.forget(rid)
    assert encoder.features.held_bytes == 0


def test_a_row_lets_go_of_media_that_it_needs_no_more_when_it_begins(encoder: Encoder) -> None:
    made, waiting, shared, needed = pictures(4)
    assert not encoder.is_ready(1, [made])
    step(encoder)
    assert not encoder.is_ready(1, [made, waiting, shared, needed])
    assert not encoder.is_ready(2, [shared])
    encoder.get(1, needed)

    encoder.keep(1, [needed.key])
    held = [encoder.features.holds(1, medium.key) for medium in (made, waiting, shared, needed)]
    assert held == [False, False, False, True]
    step(encoder)
    assert encoder.features.holds(2, shared.key)
    assert not encoder.features.holds(1, shared.key)
    assert not encoder.has_pixels
    assert waiting.key not in encoder.features
    for rid in (1, 2):
        encoder.forget(rid)
    assert encoder.features.held_bytes == 0


def test_a_row_waits_for_what_it_asks_for_now_and_not_for_what_it_asked_for_before(encoder: Encoder) -> None:
    first, second, third = pictures(3)
    assert not encoder.is_ready(1, [first, second])
    step(encoder)
    assert not encoder.is_ready(1, [first, second])
    assert encoder.is_ready(1, [first]), "there is KV of the second by now"
    assert not encoder.is_ready(1, [first, third])
    while encoder.has_pixels or third.key not in encoder.features:
        step(encoder)
    assert encoder.is_ready(1, [first, second, third])
    encoder.forget(1)
    assert encoder.features.held_bytes == 0


def test_asking_again_costs_little_however_many_wait(encoder: Encoder) -> None:
    (picture,) = pictures(1)
    rows = {
        rid: [
            Medium(
                "image", rid.to_bytes(16, "big") + at.to_bytes(16, "big"), picture.grid, picture.tokens, picture.load
            )
            for at in range(384)
        ]
        for rid in range(64)
    }
    assert not any(encoder.is_ready(rid, media) for rid, media in rows.items())
    begun = time.process_time()
    assert not any(encoder.is_ready(rid, media) for rid, media in rows.items())
    assert time.process_time() - begun < patient(0.02)
    for rid in rows:
        encoder.forget(rid)
