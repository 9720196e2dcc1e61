"""Requests to models: names, admission, defaults, bodies and generation."""
