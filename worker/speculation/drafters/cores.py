"""The part of a text model that drafters look into: its layers, its last norm and its table of embeddings."""

from typing import Any

from worker.vision.multimodal_merge import text_core


def core_of(model: Any) -> Any:
    """That part. Raises ValueError where it has another form."""
    inner = getattr(model, "model", None)
    if all(hasattr(inner, name) for name in ("word_embeddings", "layers", "norm")):
        return inner
    return text_core(model)


def embeddings_of(core: Any) -> Any:
    return core.embed_tokens if hasattr(core, "embed_tokens") else core.word_embeddings
