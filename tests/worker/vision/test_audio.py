"""Audio: towers give the features that transformers has, and clips are heard from their bytes to the answer.

The references are the first features of each row of two clips, and the first log-probabilities of the token after a
prompt with both, computed by transformers 5.23 in float32 from the same weights and inputs.
"""

import json
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from protocol.failures import Code
from protocol.to_worker import ChatPrompt, Generate, Media, Sampling
from tests.support import hearing
from tests.support.engine import EngineHarness, Result, spec
from tests.support.scale import scaled
from tests.support.small_towers import small_towers
from tests.support.vision_models import build, image, prompt, sound
from tests.worker.vision.test_sounds import tone, wav
from worker.model.loader import LoadedModel, load
from worker.vision.media import Medium
from worker.vision.multimodal_merge import MediaPlacement

# Of transformers, about the filters that Gemma 4 was trained with.
pytestmark = pytest.mark.filterwarnings("ignore:At least one mel filter")

REFERENCES = Path(__file__).parent / "reference"
RATE = 16_000


@pytest.fixture(scope="module", params=hearing.FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with small_towers():
        return build(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    with small_towers():
        return load(spec(folder), lambda *_: None)


def clips(family: str) -> list[Medium]:
    rng = np.random.default_rng(7)
    return [sound(family, rng, 5), sound(family, rng, 11)]


def features(loaded: LoadedModel, medium: Medium) -> np.ndarray:
    """As they stand beside embeddings that have been scaled."""
    assert loaded.vision is not None, loaded.no_vision
    encoded = loaded.vision.tower.encode(medium.kind, medium.tokens, medium.load())
    return np.array(encoded.embeds) * loaded.vision.needs.scale


def reference(loaded: LoadedModel) -> dict[str, Any]:
    return json.loads((REFERENCES / f"{loaded.model_type}_audio.json").read_text())


def test_features_are_those_of_transformers(loaded: LoadedModel) -> None:
    for clip, theirs in zip(clips(loaded.model_type), reference(loaded)["features"], strict=True):
        ours = features(loaded, clip)
        np.testing.assert_allclose(ours[:, : len(theirs[0])], theirs, atol=1e-4)


def logprobs(loaded: LoadedModel) -> np.ndarray:
    """Of the token after a prompt with both clips."""
    assert loaded.vision is not None
    first, second = clips(loaded.model_type)
    asked = prompt(loaded.model_type, 1, [9, first, 7, second, 12])
    merge, length = loaded.vision.merge, len(asked.ids)
    placement = MediaPlacement(asked.media, None, length)
    for medium in (first, second):
        placement.features[medium.key] = loaded.vision.tower.encode("audio", medium.tokens, medium.load())
    with merge.rows([placement], [0], [length], length):
        logits: Any = loaded.model(mx.array([asked.ids]), cache=make_prompt_cache(loaded.model))[0, -1]
        return np.array(logits - mx.logsumexp(logits))


def test_sound_is_attended_in_one_direction_as_in_transformers(loaded: LoadedModel) -> None:
    theirs = reference(loaded)["next"]
    np.testing.assert_allclose(logprobs(loaded)[: len(theirs)], theirs, atol=5e-4)


@pytest.mark.soak
def test_rows_of_an_image_of_gemma3n_are_rows_of_its_features(tmp_path: Path) -> None:
    with small_towers():
        model = load(spec(build("gemma3n", tmp_path)), lambda *_: None)
    assert model.vision is not None
    medium = image("gemma3n", np.random.default_rng(3), 16, 16)
    inputs = medium.load()
    pixels: Any = inputs["pixel_values"]
    before = features(model, medium)
    pixels[..., :16, :] += 4.0
    after = np.array(model.vision.tower.encode("image", medium.tokens, inputs).embeds) * model.vision.needs.scale
    change = np.abs(after - before).max(axis=1)[:256].reshape(16, 16)

    # Its attention spreads what changed, a little.
    assert change[0].min() > change[1:].max()


class Listener:
    """A tiny model that is asked about clips."""

    def __init__(self, engine: EngineHarness) -> None:
        self._engine = engine
        self._rids = iter(range(1, 100))

    def ask(self, *clips: bytes) -> Result:
        [result] = self._engine.run([self.request(*clips)])
        return result

    def request(self, *clips: bytes) -> Generate:
        media = tuple(
            Media("audio", blake2b(clip, digest_size=32).digest(), clip, {}, f"messages[0].content[{at}]")
            for at, clip in enumerate(clips)
        )
        parts: list[dict[str, Any]] = [{"type": "audio", "media": at} for at in range(len(clips))]
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "What do you hear?"}]}]
        sampling = Sampling(temperature=0.0, ignore_eos=True)
        return Generate(next(self._rids), ChatPrompt(messages, media=media), sampling, max_tokens=8, top_logprobs=2)

    def encoded(self) -> int:
        counts = self._engine.gauges.features
        assert counts is not None
        return counts.media_encoded


@pytest.fixture(scope="module", params=scaled(hearing.FAMILIES, ("gemma4",)))
def listener(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listener]:
    folder = hearing.build(request.param, tmp_path_factory.mktemp(request.param))
    with small_towers(), EngineHarness(spec(folder, cache_bytes=1 << 26)) as engine:
        yield Listener(engine)


LOW, HIGH = wav(tone(RATE, 0.4), RATE), wav(tone(RATE, 0.4, hertz=2000.0), RATE)


def test_clips_are_heard_each_as_itself_and_again_without_an_encode(listener: Listener) -> None:
    low, high = listener.ask(LOW), listener.ask(HIGH)
    before = listener.encoded()
    again = listener.ask(LOW)

    assert low.failure is high.failure is None
    assert low.usage is not None
    assert low.usage.audio_tokens >= 7
    assert again.ids == low.ids
    assert low.logprobs[0].logprob != high.logprobs[0].logprob
    assert listener.encoded() == before == 2
    both = listener.ask(HIGH, LOW)
    assert both.failure is None
    assert both.usage is not None
    assert both.usage.audio_tokens == 2 * low.usage.audio_tokens


def test_a_clip_that_cannot_be_heard_is_refused_with_its_place(listener: Listener) -> None:
    failed = listener.ask(LOW, wav(tone(RATE, 0.4), RATE)[:30])

    assert failed.failure is not None
    assert (failed.failure.code, failed.failure.param) == (Code.INVALID_AUDIO, "messages[0].content[1]")
