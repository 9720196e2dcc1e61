"""Engine: the step loop, its batch, queue and self-check."""

__all__ = [
    "batch",
    "gauges",
    "inbox",
    "kv_budget",
    "kv_check",
    "loop",
    "output",
    "partners",
    "row",
    "self_check",
    "silent_row",
]
