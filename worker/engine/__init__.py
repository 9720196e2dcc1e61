"""Engine: the step loop, its batch, queue, sampling and self-check."""

__all__ = ["gauges", "inbox", "kv_budget", "loop", "output", "penalties", "row", "self_check"]
