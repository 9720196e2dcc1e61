"""Verbs that chat with a model: `chat` and `run`."""
