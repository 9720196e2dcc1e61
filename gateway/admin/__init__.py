"""Admin API of the control socket: status, requests and commands."""

__all__ = ["adapter_endpoints", "endpoints", "order_body", "orders", "requests"]
