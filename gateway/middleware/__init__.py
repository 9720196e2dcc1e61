"""Middleware around every endpoint: records, keys, CORS, access log and traces."""
