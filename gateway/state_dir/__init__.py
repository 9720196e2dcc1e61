"""MLXD_HOME: its paths, its lock, and files that only its user may read."""
