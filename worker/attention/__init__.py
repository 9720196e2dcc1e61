"""Attention by our own kernels, which read the length of each row."""
