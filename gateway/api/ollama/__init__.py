"""Ollama's dialect: chats, completions, embeddings and pulls, as lines of JSON."""

__all__ = ["endpoints", "pull_stream", "refusals", "request", "response"]
