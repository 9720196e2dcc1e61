"""Kind of a model, found in its worker, settings or files. Requests that need another kind are refused."""

from typing import Final

from gateway.config.settings import ModelConfig
from gateway.errors import BadRequest
from gateway.model_files.metadata import kind_of_files
from protocol.from_worker import Ready
from protocol.kinds import AUDIO, EMBED, RERANK, TEXT

_ABILITIES: Final = {
    TEXT: "generates text: use POST /v1/chat/completions",
    EMBED: "makes embeddings: use POST /v1/embeddings",
    AUDIO: "hears or speaks: use POST /v1/audio/transcriptions, /v1/audio/translations or /v1/audio/speech",
    RERANK: "scores pairs of texts: use POST /v1/rerank or POST /v1/score",
}


def kind_of_model(model: ModelConfig, ready: Ready | None) -> str:
    """Return the kind of a model as its worker reports it or, before it is loaded, as its settings or files show it.
    Empty if the files cannot be read.
    """
    if ready is not None:
        return ready.kind or TEXT
    return kind_of_files(model.path) if model.kind == "auto" else model.kind


def check_kind(model: ModelConfig, ready: Ready | None, needed: str) -> None:
    """Raises `BadRequest` if the request needs another kind of model."""
    kind = kind_of_model(model, ready)
    if kind and kind != needed:
        message = f"The model '{model.name}' {_ABILITIES[kind]}."
        raise BadRequest(message, "model", "unsupported_model_kind")
