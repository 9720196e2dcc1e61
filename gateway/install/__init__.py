"""Installation as a service of the system."""

__all__ = ["description", "executor", "installation", "launchd", "systemd"]
