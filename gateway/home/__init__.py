"""Home of a daemon: its lock and its private files."""
