"""Home of a daemon: its paths, its lock and its private files."""

__all__ = ["folder", "home_paths", "lock", "private_file", "snapshot"]
