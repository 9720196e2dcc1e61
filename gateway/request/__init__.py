"""Requests: names to models, admission, defaults, bodies and generation."""

__all__ = [
    "admission",
    "bodies",
    "generation",
    "headers",
    "in_flight",
    "model_kind",
    "model_load",
    "record",
    "routing",
    "runtime",
    "trace_context",
]
