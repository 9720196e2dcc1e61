"""Vectors and scores are those of sentence-transformers on the same weights, and the same alone as in a batch."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np
import pytest

from protocol.checkpoint import EMBED, RERANK
from protocol.to_worker import EmbedPrompt, Generate, Prompt, Sampling, ScorePrompt
from tests.support.engine import spec
from tests.support.reading_models import EMBEDDERS, PAIRS, RERANKERS, TEXTS, build_embedder, build_reranker
from tests.support.reading_reference import QUERY
from worker.embedding.intake_and_loop import Preparer
from worker.embedding.load_model import EmbeddingInput, EmbeddingModel, kind_of_spec, load_embedding_model

# Of torch's own kernels in float32, and of ours in a batch.
FROM_TORCH: Final = 5e-6
FROM_ALONE: Final = 1e-6
REFERENCE: Final[dict[str, Any]] = json.loads(Path(__file__).with_name("reference.json").read_text())


def loaded(path: Path, kind: str) -> EmbeddingModel:
    return load_embedding_model(spec(path), kind, lambda *_: None)


def items(reader: EmbeddingModel, prompt: Prompt) -> Sequence[EmbeddingInput]:
    return Preparer(reader).job(Generate(1, prompt, Sampling()), 0.0).items


def check_batches(reader: EmbeddingModel, several: Sequence[EmbeddingInput], want: Any) -> None:
    """Alone, all together with much padding, and those of nearly one length."""
    alone = np.concatenate([reader.compute([item]) for item in several])
    assert np.abs(alone - np.array(want, np.float32).reshape(alone.shape)).max() < FROM_TORCH
    assert np.isfinite(alone).all()
    assert np.abs(reader.compute(several) - alone).max() < FROM_ALONE
    assert np.abs(reader.compute([several[0]] * 3) - alone[0]).max() < FROM_ALONE


@pytest.mark.parametrize("family", EMBEDDERS)
def test_vectors_are_those_of_sentence_transformers(family: str, tmp_path: Path) -> None:
    path = build_embedder(family, tmp_path / "m")
    reader, want = loaded(path, EMBED), REFERENCE["embed"][family]
    assert kind_of_spec(spec(path)) == EMBED
    check_batches(reader, items(reader, EmbedPrompt(TEXTS)), want["texts"])
    query = items(reader, EmbedPrompt((QUERY,), is_query=True))
    assert np.abs(reader.compute(query) - np.array(want["query"])).max() < FROM_TORCH
    assert reader.embedding is not None
    assert (reader.embedding.dimensions, reader.embedding.is_matryoshka) == (len(want["query"]), False)
    assert reader.embedding.prompts == ("query", "document")


@pytest.mark.parametrize("family", RERANKERS)
def test_scores_are_those_of_sentence_transformers(family: str, tmp_path: Path) -> None:
    path = build_reranker(family, tmp_path / "a-reranker")
    reader = loaded(path, RERANK)
    assert kind_of_spec(spec(path)) == RERANK
    queries, documents = zip(*PAIRS, strict=True)
    check_batches(reader, items(reader, ScorePrompt(queries, documents)), REFERENCE["rerank"][family])


def test_an_encoder_in_8_bits_is_close_to_itself(tmp_path: Path) -> None:
    path = build_embedder("bert", tmp_path / "m")
    exact = loaded(path, EMBED)
    texts = items(exact, EmbedPrompt(TEXTS))
    weights: Any = mx.load(str(path / "model.safetensors"))
    # Layers of 48 inputs, which is no multiple of a group, stay as they are.
    linear = (name for name in list(weights) if ".layer." in name and weights[name].shape[-1:] == (32,))
    for name in (name for name in linear if weights[name].ndim == 2):
        parts = mx.quantize(weights.pop(name), group_size=32, bits=8)
        stem = name.removesuffix(".weight")
        weights |= {f"{stem}.{part}": array for part, array in zip(("weight", "scales", "biases"), parts, strict=True)}
    mx.save_safetensors(str(path / "model.safetensors"), weights)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization": {"group_size": 32, "bits": 8}}))
    rounded = loaded(path, EMBED)
    assert rounded.weights_bytes < exact.weights_bytes
    assert (rounded.compute(texts) * exact.compute(texts)).sum(axis=1).min() > 0.999
