"""Lines of the JSON log file: decoding, and selection by model."""

from typing import Any

import msgspec


def read_line(line: str) -> dict[str, Any] | None:
    """Decode a line into its fields; None if the line is no JSON object."""
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.DecodeError:
        return None


def is_about(line: str, model: str) -> bool:
    """Whether a line is about a request for the model, its worker or its supervisor."""
    fields = read_line(line)
    if fields is None:
        return False
    message = f" {fields.get('message', '')}"
    if fields.get("target") == model and str(fields.get("action", "")).startswith("model."):
        return True
    return fields.get("model") == model or f" {model}#" in message or f"model {model}:" in message
