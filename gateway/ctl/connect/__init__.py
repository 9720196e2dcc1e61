"""`mlxctl connect`: clients configured for this mlxd."""

__all__ = ["verb"]
