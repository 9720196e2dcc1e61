"""API that clients use: routes beside the dialects, and the table of all operations."""

__all__ = ["anthropic", "health", "models", "openai", "operations", "responses", "tokenize"]
