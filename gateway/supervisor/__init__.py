"""Supervision of worker processes: start, heartbeat, restart policy and failover."""

__all__ = ["handle", "os_process", "ports", "registry", "spawn", "state"]
