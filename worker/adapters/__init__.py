"""Adapters: low-rank updates of a model's linear layers, chosen row by row in one batch."""

__all__ = ["adapter_files", "adapters"]
