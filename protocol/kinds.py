"""Kinds of models (text generation, embeddings, scores of pairs, audio) and their detection from a model's files.

The gateway determines the kind before a load, the worker during one; a model's setting `kind` overrides both.
"""

import re
from collections.abc import Container, Mapping
from typing import Any, Final

TEXT: Final = "text"
EMBED: Final = "embed"
RERANK: Final = "rerank"
AUDIO: Final = "audio"
# sentence-transformers' file that lists the steps from hidden states to a vector.
MODULES: Final = "modules.json"
# Architectures without causal attention, which cannot generate text.
ENCODERS: Final = ("bert", "roberta", "xlm-roberta", "camembert", "modernbert", "nomic_bert")
# Speech-to-text families, under the names that mlx-audio uses.
TRANSCRIBERS: Final = ("whisper", "moonshine", "parakeet", "qwen3_asr")
# Parakeet has no model_type, but its configuration has a `target` with this prefix.
_PARAKEET_TARGET: Final = "nemo.collections.asr."
SPEAKERS: Final = ("soprano", "qwen3_tts")
# Soprano's config.json describes only its inner decoder, so a Soprano model is recognised by name.
_SOPRANO: Final = re.compile(r"(^|[-_.])soprano([-_.]|$)", re.IGNORECASE)
_CLASSIFIER: Final = "ForSequenceClassification"
# Embedding and reranking decoders have the configuration of a generating model, so they are recognised by name.
_RERANKER: Final = re.compile(r"rerank", re.IGNORECASE)
# Path of a snapshot in the Hugging Face cache.
_SNAPSHOT: Final = re.compile(r"models--(?:[^/]*--)?([^/]+)/snapshots/[^/]+$")
_EMBEDDER: Final = re.compile(r"(^|[-_.])embed(ding|der)?s?([-_.]|$)", re.IGNORECASE)


def kind_of(config: Mapping[str, Any], files: Container[str], name: str) -> str:
    """Return the kind of a model, from its config.json, the names of its files and the name of its repository."""
    architectures = config.get("architectures")
    listed = architectures if isinstance(architectures, list) else []
    if audio_family(config, name):
        return AUDIO
    if any(isinstance(each, str) and each.endswith(_CLASSIFIER) for each in listed):
        return RERANK
    last = _last_part(name)
    if _RERANKER.search(last):
        return RERANK
    is_encoder = config.get("model_type") in ENCODERS or config.get("use_bidirectional_attention") is True
    if MODULES in files or is_encoder or _EMBEDDER.search(last):
        return EMBED
    return TEXT


def audio_family(config: Mapping[str, Any], name: str) -> str:
    """Return the family of an audio model; empty for any other model."""
    model_type, target = config.get("model_type"), config.get("target")
    if isinstance(target, str) and target.startswith(_PARAKEET_TARGET):
        return "parakeet"
    if model_type in (*TRANSCRIBERS, *SPEAKERS):
        return str(model_type)
    return "soprano" if _SOPRANO.search(_last_part(name)) else ""


def _last_part(name: str) -> str:
    """Return the last part of a path or a repository's name; of a snapshot's path, that of its repository's name."""
    path = name.rstrip("/")
    snapshot = _SNAPSHOT.search(path)
    return snapshot[1] if snapshot is not None else path.rpartition("/")[2]
