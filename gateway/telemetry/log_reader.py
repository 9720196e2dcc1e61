"""Lines of the log file: JSON, and which of them are about a model."""

from typing import Any

import msgspec


def read_line(line: str) -> dict[str, Any] | None:
    """The fields of a line; None for what is no JSON object."""
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.DecodeError:
        return None


def is_about(line: str, model: str) -> bool:
    """A request for the model, or a line of its worker or of its supervisor."""
    fields = read_line(line)
    if fields is None:
        return False
    message = f" {fields.get('message', '')}"
    if fields.get("target") == model and str(fields.get("action", "")).startswith("model."):
        return True
    return fields.get("model") == model or f" {model}#" in message or f"model {model}:" in message
