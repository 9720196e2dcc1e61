"""Model in memory: its load, its lane and the memory that it leaves."""

__all__ = ["lanes", "loader", "memory", "packing"]
