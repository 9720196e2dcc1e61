"""Experts on disk: a model's experts in records of their own, and a cache of those that were used last."""

__all__ = ["expert_cache", "records"]
