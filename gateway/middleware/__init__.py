"""Middleware around every endpoint: request records, authentication, CORS, access log and traces."""
