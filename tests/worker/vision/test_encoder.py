"""Jobs of the encoder: what rows wait for is made once, and nothing is made or held for those that wait no more."""

import random
import time
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.engine import spec
from tests.support.scale import patient
from tests.support.vision_models import build, image
from worker.model.loader import load
from worker.vision.encoder import FeatureCache, MediaEncoder
from worker.vision.media import Medium
from worker.vision.multimodal_merge import MediaFeatures
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
def encoder(tower: Tower) -> Generator[MediaEncoder]:
    made = MediaEncoder(tower, FeatureCache(1 << 24), lambda: None)
    yield made
    made.features.check()
    made.close()


def pictures(count: int) -> list[Medium]:
    rng = np.random.default_rng(7)
    return [image(FAMILY, rng, 4, 4) for _ in range(count)]


def step(encoder: MediaEncoder) -> None:
    """One step, with pixels if there is a job."""
    deadline = time.monotonic() + patient(10)
    while not encoder.is_busy and time.monotonic() < deadline:
        time.sleep(0.001)
    assert encoder.step() == []


def test_a_row_lets_go_of_media_that_it_needs_no_more_when_it_begins(encoder: MediaEncoder) -> None:
    made, waiting, shared, needed = pictures(4)
    assert not encoder.is_ready(1, [made])
    step(encoder)
    assert not encoder.is_ready(1, [made, waiting, shared, needed])
    assert not encoder.is_ready(2, [shared])

    encoder.keep(1, [needed.key])
    assert not any(encoder.features.holds(1, medium.key) for medium in (made, waiting, shared, needed))
    while shared.key not in encoder.features:
        step(encoder)
    assert encoder.features.holds(2, shared.key)
    assert not encoder.features.holds(1, shared.key)
    assert waiting.key not in encoder.features
    for rid in (1, 2):
        encoder.forget(rid)
    assert encoder.features.held_bytes == 0


def test_a_row_waits_for_what_it_asks_for_now_and_not_for_what_it_asked_for_before(encoder: MediaEncoder) -> None:
    first, second, third = pictures(3)
    assert not encoder.is_ready(1, [first, second])
    step(encoder)
    assert not encoder.is_ready(1, [first, second])
    assert encoder.is_ready(1, [first]), "there is KV of the second by now"
    assert not encoder.is_ready(1, [first, third])
    while third.key not in encoder.features:
        step(encoder)
    assert encoder.is_ready(1, [first, second, third])
    encoder.forget(1)
    assert encoder.features.held_bytes == 0


class Rows:
    """Rows as the engine's loop asks for their media: in an order, each until it has them, and then in prefill."""

    def __init__(self, encoder: MediaEncoder, media: dict[int, list[Medium]]) -> None:
        self._encoder = encoder
        self.waiting = dict(media)
        self._running: dict[int, list[Medium]] = {}
        self.most_held = 0

    def tick(self, order: Iterable[int]) -> None:
        for rid, media in list(self._running.items()):
            self._encoder.release(rid, [media.pop().key])
            if not media:
                self._encoder.forget(rid)
                del self._running[rid]
        held = 0
        for rid in order:
            if self._encoder.is_ready(rid, self.waiting[rid], is_first=not held):
                self._running[rid] = media = self.waiting.pop(rid)
                assert all(self._encoder.features.holds(rid, medium.key) for medium in media)
                self._encoder.keep(rid, [medium.key for medium in media])
            else:
                held += 1
        assert self._encoder.step() == []
        self._encoder.features.check()
        self.most_held = max(self.most_held, self._encoder.features.held_bytes)


@pytest.mark.parametrize("is_shared", [False, True])
def test_rows_that_wait_hold_no_more_than_the_budget_and_what_one_row_needs(tower: Tower, is_shared: bool) -> None:
    """A burst of many times the budget, in the order of arrival and in one that changes all the time."""
    seen = pictures(40)
    size = tower.encode("image", seen[0].tokens, seen[0].load()).nbytes
    rng = random.Random(5)
    for changes in (0, 30):
        encoder = MediaEncoder(tower, FeatureCache(3 * size, held_min=0), lambda: None)
        media = {rid: rng.sample(seen[:8], 4) if is_shared else seen[4 * rid : 4 * rid + 4] for rid in range(10)}
        rows, deadline = Rows(encoder, media), time.monotonic() + patient(30)
        while rows.waiting:
            assert time.monotonic() < deadline, "every row runs in the end"
            changes -= 1
            order = list(rows.waiting)
            rows.tick(rng.sample(order, len(order)) if changes > 0 else order)
        assert 3 * size < rows.most_held <= (3 + 4) * size
        for rid in range(10):
            encoder.forget(rid)
        assert encoder.features.held_bytes == 0
        encoder.close()


def test_the_first_row_takes_back_what_rows_behind_it_hold(tower: Tower) -> None:
    """Also of a row that has all of its media, and is not asked for them: it waits for something else."""
    (one, *others) = pictures(4)
    size = tower.encode("image", one.tokens, one.load()).nbytes
    encoder = MediaEncoder(tower, FeatureCache(0, held_min=size), lambda: None)
    while not encoder.is_ready(1, others, is_first=True):
        step(encoder)
    assert encoder.features.held_bytes == 3 * size
    while not encoder.is_ready(2, [one], is_first=True):
        step(encoder)
    assert encoder.features.held_bytes == size
    assert not encoder.is_ready(1, others)
    encoder.keep(2, [one.key])
    encoder.release(2, [one.key])
    while not encoder.is_ready(1, others, is_first=True):
        step(encoder)
    encoder.close()


class Failing(Tower):
    """A tower that finds no memory, so many times."""

    def __init__(self, tower: Tower, failures: int) -> None:
        super().__init__(tower._model, tower.needs)  # pyright: ignore[reportPrivateUsage]
        self.failures = failures

    def encode(self, kind: str, tokens: int, inputs: Any) -> MediaFeatures:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("[metal::malloc] Unable to allocate 1073741824 bytes.")
        return super().encode(kind, tokens, inputs)


def test_an_encode_that_finds_no_memory_is_tried_once_more_and_then_fails_its_rows(tower: Tower) -> None:
    encoder = MediaEncoder(Failing(tower, 3), FeatureCache(1 << 24), lambda: None)
    first, second = pictures(2)

    def attempt() -> list[tuple[int, Exception]]:
        deadline = time.monotonic() + patient(10)
        while not encoder.is_busy and time.monotonic() < deadline:
            time.sleep(0.001)
        return encoder.step()

    assert not encoder.is_ready(1, [first])
    with pytest.raises(RuntimeError, match="Unable to allocate"):
        attempt()
    assert [rid for rid, _ in attempt()] == [1]
    encoder.forget(1)
    assert not encoder.is_ready(2, [second])
    with pytest.raises(RuntimeError, match="Unable to allocate"):
        attempt()
    assert attempt() == []
    assert encoder.is_ready(2, [second])
    assert (encoder.features.counts.media_failed, encoder.features.counts.media_decoded) == (1, 2)
    encoder.close()


def test_asking_again_costs_little_however_many_wait(encoder: MediaEncoder) -> None:
    (picture,) = pictures(1)
    rows = {
        rid: [
            Medium("image", rid.to_bytes(16, "big") + at.to_bytes(16, "big"), picture.tokens, picture.load)
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
