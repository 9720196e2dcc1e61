"""Attention inside an image of Gemma 3 and 4, against transformers' own numbers.

`reference` has the first log-probabilities of the token after each of three prompts, computed by transformers 5.23 in
float32 from the same weights and pixels; of Gemma 4 from the features that mlx-vlm's tower makes of these.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from tests.support.engine import spec
from tests.support.vision_models import build, image, prompt
from worker.model.loader import LoadedModel, load
from worker.vision.multimodal_merge import MediaPlacement, MultimodalMerge

REFERENCES = Path(__file__).parent / "reference"


@pytest.fixture(scope="module", params=["gemma3", "gemma4"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(spec(build(request.param, tmp_path_factory.mktemp(request.param))), lambda *_: None)


def reference(loaded: LoadedModel) -> list[list[float]]:
    return json.loads((REFERENCES / f"{loaded.model_type}.json").read_text())


def logprobs(loaded: LoadedModel, *, is_block: bool = True) -> list[np.ndarray]:
    """Of the token after each prompt, whose text and images are those of the reference."""
    assert loaded.vision is not None
    rng = np.random.default_rng(7)
    first, second = (image(loaded.model_type, rng, 4, 4) for _ in range(2))
    computed: list[np.ndarray] = []
    for seed, parts in enumerate(([9, first, 7], [20], [5, first, 6, second, 30]), start=1):
        asked = prompt(loaded.model_type, seed, parts)
        placement = MediaPlacement(asked.media, None, len(asked.ids))
        for medium in {span.medium for span in asked.media}:
            encoded = loaded.vision.tower.encode(medium.kind, medium.tokens, medium.load())
            placement.features[medium.key] = encoded
        merge: MultimodalMerge = loaded.vision.merge
        length = len(asked.ids)
        with merge.rows([placement], [0], [length], length):
            if not is_block and merge.chunk is not None:
                merge.chunk = replace(merge.chunk, block=np.zeros_like(merge.chunk.block))
            logits: Any = loaded.model(mx.array([asked.ids]), cache=make_prompt_cache(loaded.model))[0, -1]
            computed.append(np.array(logits - mx.logsumexp(logits)))
    return computed


def test_numbers_are_those_of_transformers(loaded: LoadedModel) -> None:
    for ours, theirs in zip(logprobs(loaded), reference(loaded), strict=True):
        np.testing.assert_allclose(ours[: len(theirs)], theirs, atol=2e-4)


def test_causal_attention_inside_an_image_gives_others(loaded: LoadedModel) -> None:
    causal = logprobs(loaded, is_block=False)
    errors = [
        np.abs(ours[: len(theirs)] - theirs).max() for ours, theirs in zip(causal, reference(loaded), strict=True)
    ]
    assert errors[1] < 2e-4, "the prompt without an image"
    assert min(errors[0], errors[2]) > 0.05
