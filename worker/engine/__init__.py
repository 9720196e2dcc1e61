"""Engine: the step loop, its batch, queue and self-check."""

__all__ = ["gauges", "inbox", "kv_budget", "loop", "output", "row", "self_check"]
