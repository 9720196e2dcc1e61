"""`mlxctl setup`: parts that are installed beside mlxd."""

__all__ = ["verbs"]
