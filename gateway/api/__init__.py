"""Dialects of the HTTP API, and the endpoints beside them."""
