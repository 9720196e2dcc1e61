"""Requests: names to models, admission, defaults, bodies and generation."""
