"""Drafts by models: heads for multi-token prediction that a checkpoint has, and models of their own beside it."""

__all__ = ["proposers", "stored_head", "taps"]
