"""Verbs of the service: install, start, stop, restart and look."""

__all__ = ["verb"]
