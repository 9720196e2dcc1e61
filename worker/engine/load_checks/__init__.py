"""Checks at model load that a fast path gives the same tokens as the plain path."""
