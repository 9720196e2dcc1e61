"""mlx-lm's own forward pass and generation in this process: the reference that mlxd is compared with."""

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm import load, stream_generate


@dataclass(frozen=True, slots=True)
class Reference:
    """A model and its tokenizer as mlx-lm loads them."""

    model: Any
    tokenizer: Any

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text))

    def chat_ids(self, *messages: dict[str, Any]) -> list[int]:
        return list(self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True))

    def logprobs(self, ids: list[int]) -> list[float]:
        """The log-probability of each token but the first, of one forward pass over all."""
        logits = self.model(mx.array([ids[:-1]]))[0].astype(mx.float32)
        normalized = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        chosen = mx.take_along_axis(normalized, mx.array(ids[1:])[:, None], axis=-1)
        return [float(each) for each in chosen[:, 0].tolist()]  # type: ignore[union-attr]

    def greedy(self, ids: list[int], tokens: int) -> str:
        return "".join(each.text for each in stream_generate(self.model, self.tokenizer, ids, max_tokens=tokens))


@cache
def reference(folder: Path) -> Reference:
    model, tokenizer = load(str(folder))[:2]
    return Reference(model, tokenizer)


def perplexity(logprobs: list[float]) -> float:
    return math.exp(-sum(logprobs) / len(logprobs))


def largest_difference(first: list[float], second: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(first, second, strict=True))
