"""Attention by kernels of ours, which read the length of each row."""
