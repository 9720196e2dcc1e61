"""Scheduling: the queue, budgets of KV and memory, and the size of prefill chunks by measured time."""
