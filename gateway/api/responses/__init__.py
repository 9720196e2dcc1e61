"""OpenAI's Responses dialect, with the store of responses."""

__all__ = ["endpoints", "request", "response"]
