"""Supervision of worker processes: start, heartbeat, restart policy and exits."""
