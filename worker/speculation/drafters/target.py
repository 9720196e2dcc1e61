"""Parts of the target that drafters use: its text core, its embedding table, its head and its vocabulary size."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from worker.model.loader import cast, nbytes
from worker.vision.multimodal_merge import text_core


def core_of(model: Any) -> Any:
    """Return the model's part with the layers, the last norm and the embedding table. Raises ValueError for another
    structure.
    """
    inner = getattr(model, "model", None)
    if all(hasattr(inner, name) for name in ("word_embeddings", "layers", "norm")):
        return inner
    return text_core(model)


def tables(model: Any, own: Mapping[str, mx.array] = MappingProxyType({})) -> tuple[Any, Any]:
    """Return the embedding table and the function from hidden states to logits: `own` arrays replace the target's."""
    core, holder = core_of(model), model
    if getattr(holder, "lm_head", None) is None:
        holder = getattr(model, "language_model", model)
    embed = getattr(getattr(model, "multimodal_merge", None), "embed", None) or getattr(core, "embed_tokens", None)
    embed = embed or core.word_embeddings
    lm_head = getattr(holder, "lm_head", None) or embed.as_linear
    if "embed" in own:
        embed = nn.Embedding(1, 1)
        embed.weight = own["embed"]
    if "lm_head" in own:
        lm_head = nn.Linear(1, 1, bias=False)
        lm_head.weight = own["lm_head"]
    return embed, lm_head


def with_vocab(logits: mx.array, vocab: int) -> mx.array:
    """Cut or pad logits to `[…, vocab]`: the sampling noise depends on the target's vocabulary size."""
    logits = logits[..., :vocab]
    missing = vocab - logits.shape[-1]
    if not missing:
        return logits
    return mx.pad(logits, [*[(0, 0)] * (logits.ndim - 1), (0, missing)], constant_values=-mx.inf)


def evaluate_weights(module: Any, dtype: mx.Dtype) -> int:
    """Evaluate the weights of a drafter, cast to float32 if the target's are; return their bytes."""
    if dtype == mx.float32:
        cast(module, "float32")
    mx.eval(module.parameters())
    return nbytes(module)
