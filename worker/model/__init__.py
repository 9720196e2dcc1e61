"""Model in memory: its load, its lane and the memory that it leaves."""

__all__ = ["agreement", "device", "division", "lanes", "linears", "loader", "memory", "packing"]
