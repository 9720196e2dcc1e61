"""Supervision of worker processes: start, heartbeat, restart policy and failover."""

__all__ = ["handle", "os_process", "ports", "ranks", "registry", "spawn", "state"]
