"""Verbs from a name on the Hugging Face hub to an answer."""

__all__ = ["repack", "run", "search"]
