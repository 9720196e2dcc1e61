"""`mlxctl route`: places of requests."""

__all__ = ["route"]
