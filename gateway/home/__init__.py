"""Home of a daemon: its lock and its private files."""

__all__ = ["folder", "lock", "private_file", "snapshot"]
