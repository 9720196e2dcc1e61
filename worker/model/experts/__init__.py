"""Experts of a mixture that are read from disk."""
