"""Requests of unequal lengths over HTTP, beside a bare batch loop that is fed the same list."""
