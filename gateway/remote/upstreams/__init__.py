"""Fallback of a request to an OpenAI-compatible server."""
