"""Importance of tokens: the attention of a model that goes on with a prompt, whatever the time that its reading has."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generation_stream
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from tests.support.models import VOCAB
from worker.errors import LoadFailed
from worker.model.loader import LoadedModel
from worker.sparse_prefill import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    LOOKAHEAD_TOKENS,
    MIN_CHUNK_TOKENS,
    POOL_TOKENS,
    PRODUCTS_PER_CHUNK,
    Chooser,
    ImportanceReader,
    chunk_at,
)

PROMPT = np.random.default_rng(3).integers(20, 420, CHUNK_TOKENS + 90).astype(np.int32)


def loaded(model: Any) -> LoadedModel:
    return LoadedModel(model, None, Path("draft"), "qwen3", VOCAB, 4096, (), 0)


@pytest.fixture
def model(model_folder: Callable[[str], Path]) -> Any:
    return load_model(model_folder("qwen3"))[0]


def read(model: Any) -> np.ndarray:
    reading = ImportanceReader(loaded(model)).read(PROMPT)
    while not reading.is_complete:
        reading.step()
    return reading.importance


def test_it_is_the_largest_attention_of_all_heads_averaged_over_neighbours_and_queries(model: Any) -> None:
    expected, ids = np.zeros(len(PROMPT)), PROMPT.tolist()
    for _ in range(LOOKAHEAD_TOKENS):
        most = np.zeros(len(PROMPT))
        x = model.model.embed_tokens(mx.array([ids]))
        mask = create_attention_mask(x)
        for layer in model.layers:
            own, normed = layer.self_attn, layer.input_layernorm(x)
            shape = (1, len(ids), -1, 16)
            queries = own.rope(own.q_norm(own.q_proj(normed).reshape(shape)).transpose(0, 2, 1, 3))
            keys = own.rope(own.k_norm(own.k_proj(normed).reshape(shape)).transpose(0, 2, 1, 3))
            keys = mx.repeat(keys, queries.shape[1] // keys.shape[1], axis=1)[:, :, : len(PROMPT)]
            shares = np.array(mx.softmax(queries[0, :, -1:] @ keys[0].swapaxes(-1, -2) / 4.0, axis=-1))[:, 0]
            pooled = [np.convolve(share, np.full(POOL_TOKENS, 1 / POOL_TOKENS), mode="same") for share in shares]
            most = np.maximum(most, np.max(pooled, axis=0))
            x = layer(x, mask, None)
        expected += most
        ids.append(int(mx.argmax(model(mx.array([ids]), cache=make_prompt_cache(model))[0, -1]).item()))
    assert np.allclose(read(model), expected, atol=1e-4)


def test_a_choice_is_the_same_whatever_the_time_and_is_remembered_for_the_same_salt(model: Any) -> None:
    prompt = np.random.default_rng(4).integers(20, 420, 9 * BLOCK_TOKENS).astype(np.int32)
    choices = [Chooser(ImportanceReader(loaded(model)), generation_stream) for _ in range(2)]
    passes = 0
    for chooser, limit_s in zip(choices, (0.0, 1e9), strict=True):
        assert chooser.kept(1, prompt, 0.8, "a") is None
        assert chooser.nbytes > 0
        while chooser.is_busy:
            chooser.step(limit_s)
            passes += limit_s == 0.0
    hurried, patient = (chooser.kept(1, prompt, 0.8, "a") for chooser in choices)
    assert passes > LOOKAHEAD_TOKENS
    assert hurried is not None
    assert patient is not None
    assert hurried.runs == patient.runs
    chooser = choices[0]
    assert (chooser.counts.sparse_prompts, chooser.counts.sparse_prompt_tokens, chooser.nbytes) == (1, len(prompt), 0)
    assert chooser.kept(2, prompt, 0.8, "b") is None, "another salt"
    chooser.forget(3)
    assert chooser.is_busy
    chooser.forget(2)
    assert not chooser.is_busy
    assert chooser.nbytes == 0


def test_chunks_get_smaller_as_the_prompt_gets_longer() -> None:
    sizes = [chunk_at(done) for done in (0, 4096, 65_536, 1 << 20, 1 << 24)]
    assert sizes[0] == CHUNK_TOKENS
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == MIN_CHUNK_TOKENS
    assert all(
        size == MIN_CHUNK_TOKENS or size * done <= PRODUCTS_PER_CHUNK
        for size, done in zip(sizes, (0, 4096, 65_536), strict=False)
    )


def test_a_model_whose_queries_cannot_be_seen_is_refused(model: Any) -> None:
    for layer in model.layers:
        layer.self_attn.turn = layer.self_attn.pop("rope")
    with pytest.raises(LoadFailed, match="cannot choose tokens for a sparse prefill: "):
        ImportanceReader(loaded(model))
