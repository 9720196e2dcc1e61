"""MiniLM in numpy alone, one text at a time: the reference for embeddings."""

import json
import math
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer

Array: TypeAlias = np.ndarray[Any, Any]


class NumpyBert:
    """BERT's encoder with mean pooling and a unit norm, in float64."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        loaded = load_file(folder / "model.safetensors")
        self._weights = {name: each.astype(np.float64) for name, each in loaded.items() if each.dtype.kind == "f"}
        self._heads, self._layers = config["num_attention_heads"], config["num_hidden_layers"]
        self._epsilon = config["layer_norm_eps"]
        self.longest = json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"]
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(self.longest)

    def ids(self, text: str) -> list[int]:
        """The ids of a text, cut to the model's longest input."""
        return list(self._tokenizer.encode(text).ids)

    def embed(self, text: str) -> Array:
        ids = self.ids(text)
        names = ("word_embeddings", "position_embeddings", "token_type_embeddings")
        words, positions, types = (self._weights[f"embeddings.{name}.weight"] for name in names)
        hidden = self._norm(words[ids] + positions[: len(ids)] + types[0], "embeddings.LayerNorm")
        for layer in range(self._layers):
            hidden = self._layer(hidden, f"encoder.layer.{layer}")
        mean = hidden.mean(axis=0)
        return mean / np.linalg.norm(mean)

    def _layer(self, hidden: Array, name: str) -> Array:
        queries, keys, values = (
            self._split(self._linear(hidden, f"{name}.attention.self.{part}")) for part in ("query", "key", "value")
        )
        scores = queries @ keys.swapaxes(1, 2) / math.sqrt(queries.shape[-1])
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        attended = (weights @ values).swapaxes(0, 1).reshape(hidden.shape)
        attended = self._linear(attended, f"{name}.attention.output.dense")
        hidden = self._norm(hidden + attended, f"{name}.attention.output.LayerNorm")
        inner = self._linear(hidden, f"{name}.intermediate.dense")
        gelu = inner * 0.5 * (1.0 + np.vectorize(math.erf)(inner / math.sqrt(2.0)))
        return self._norm(hidden + self._linear(gelu, f"{name}.output.dense"), f"{name}.output.LayerNorm")

    def _linear(self, hidden: Array, name: str) -> Array:
        return hidden @ self._weights[f"{name}.weight"].T + self._weights[f"{name}.bias"]

    def _norm(self, hidden: Array, name: str) -> Array:
        centred = hidden - hidden.mean(axis=-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + self._epsilon)
        return scaled * self._weights[f"{name}.weight"] + self._weights[f"{name}.bias"]

    def _split(self, hidden: Array) -> Array:
        return hidden.reshape(len(hidden), self._heads, -1).swapaxes(0, 1)
