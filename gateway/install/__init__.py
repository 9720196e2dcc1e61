"""Installation as a service of the system, and its upgrades."""

__all__ = ["description", "executor", "fetch", "launchd", "releases", "systemd", "upgrade"]
