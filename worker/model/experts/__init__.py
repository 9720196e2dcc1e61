"""Experts of a mixture-of-experts model that are read from disk."""
