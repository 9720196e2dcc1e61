"""Memory of the machine: estimates, grants, the broker and its policy."""

__all__ = ["broker", "estimate", "host", "monitor"]
