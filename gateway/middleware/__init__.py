"""Middleware around every endpoint: records, keys, CORS, access log and traces."""

__all__ = ["auth", "cors", "entry", "otel"]
