"""`mlxctl ui`: the page in a browser."""

__all__ = ["ui"]
