"""Admin API of the control socket: status, requests and commands."""

__all__ = ["endpoints", "orders", "requests"]
