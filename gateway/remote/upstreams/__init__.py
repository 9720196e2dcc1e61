"""Fallback of requests to OpenAI-compatible servers."""
