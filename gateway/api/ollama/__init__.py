"""Ollama's dialect: chats, completions, embeddings and pulls, as lines of JSON."""

__all__ = ["embed", "endpoints", "pull_stream", "refusals", "request", "response"]
