"""API that clients use: routes beside the dialects, and the table of all operations."""

__all__ = [
    "anthropic",
    "catalog",
    "health",
    "infill",
    "lm_studio",
    "models",
    "ollama",
    "ollama_models",
    "openai",
    "operations",
    "peer_requests",
    "props",
    "responses",
    "scores",
    "tokenize",
    "upstream",
]
