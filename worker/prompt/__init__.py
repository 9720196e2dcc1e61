"""Prompts: from a request to a row by template, tokenizer and validation."""

__all__ = ["intake", "questions", "sparse_limits", "templates"]
