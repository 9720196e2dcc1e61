"""Verbs that talk with a model: `chat` and `run`."""
