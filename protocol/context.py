"""A model's context window as its config.json gives it: the gateway reads it before a load, the worker at one."""

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
    """The first key that is set, in the configuration or in that of its text model, and its value as it stands there.

    None where config.json is silent: what the model class and the tokenizer say is known at a load only.
    """
    text = config.get("text_config")
    parts = [part for part in (config, text) if isinstance(part, dict)]
    return next(((key, part[key]) for key in CONTEXT_KEYS for part in parts if part.get(key)), None)
