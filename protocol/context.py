"""Context window in a model's config.json, which the gateway reads before a load and the worker during one."""

from typing import Any, Final

CONTEXT_KEYS: Final = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "max_seq_length",
    "n_ctx",
    "model_max_length",
)


def context_of(config: dict[str, Any]) -> tuple[str, Any] | None:
    """Return the first key that is set, in the configuration or its text model's, with its raw value.

    None if config.json has no limit: those of the model class and the tokenizer are only known at load.
    """
    text = config.get("text_config")
    parts = [part for part in (config, text) if isinstance(part, dict)]
    return next(((key, part[key]) for key in CONTEXT_KEYS for part in parts if part.get(key)), None)
