"""Kinds of models: text that is generated, embeddings, scores of pairs, audio. The files of a model tell its kind.

The gateway asks before a load, the worker at one; `kind` of a model's settings stands above both.
"""

import re
from collections.abc import Container, Mapping
from typing import Any, Final

TEXT: Final = "text"
EMBED: Final = "embed"
RERANK: Final = "rerank"
AUDIO: Final = "audio"
# By sentence-transformers: the steps from hidden states to a vector.
MODULES: Final = "modules.json"
# Architectures that see all of their input at once, and so generate nothing.
ENCODERS: Final = ("bert", "roberta", "xlm-roberta", "camembert", "modernbert", "nomic_bert")
# Families that hear speech and write it down, and that speak, by their names in mlx-audio.
HEARERS: Final = ("whisper", "moonshine", "parakeet", "qwen3_asr")
# Of the configuration of parakeet, which has no model_type.
_NEMO: Final = "nemo.collections.asr."
SPEAKERS: Final = ("soprano", "qwen3_tts")
# Its configuration is that of the decoder inside of it.
_SOPRANO: Final = re.compile(r"(^|[-_.])soprano([-_.]|$)", re.IGNORECASE)
_CLASSIFIER: Final = "ForSequenceClassification"
# Decoders that make embeddings or scores have the configuration of one that generates: their names tell.
_RERANKER: Final = re.compile(r"rerank", re.IGNORECASE)
_EMBEDDER: Final = re.compile(r"(^|[-_.])embed(ding|der)?s?([-_.]|$)", re.IGNORECASE)


def kind_of(config: Mapping[str, Any], files: Container[str], name: str) -> str:
    """The kind of a model, by its config.json, the names of the files beside it and the name of its repository."""
    architectures = config.get("architectures")
    listed = architectures if isinstance(architectures, list) else []
    if audio_family(config, name):
        return AUDIO
    if any(isinstance(each, str) and each.endswith(_CLASSIFIER) for each in listed):
        return RERANK
    last = name.rstrip("/").rpartition("/")[2]
    if _RERANKER.search(last):
        return RERANK
    is_encoder = config.get("model_type") in ENCODERS or config.get("use_bidirectional_attention") is True
    if MODULES in files or is_encoder or _EMBEDDER.search(last):
        return EMBED
    return TEXT


def audio_family(config: Mapping[str, Any], name: str) -> str:
    """The family of a model that hears or speaks; empty for any other."""
    model_type, target = config.get("model_type"), config.get("target")
    if isinstance(target, str) and target.startswith(_NEMO):
        return "parakeet"
    if model_type in (*HEARERS, *SPEAKERS):
        return str(model_type)
    return "soprano" if _SOPRANO.search(name.rstrip("/").rpartition("/")[2]) else ""
