"""Prefix cache: radix tree in memory, files on disk, and events of both."""
