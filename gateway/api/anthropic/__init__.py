"""Anthropic's dialect: messages and their token counts."""

__all__ = ["endpoints", "request", "response"]
