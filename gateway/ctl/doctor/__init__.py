"""`mlxctl doctor`: checks of an installation."""

__all__ = ["checks", "verb"]
