"""Verbs of the service: install, start, stop, upgrade and roll back."""

__all__ = ["verb"]
