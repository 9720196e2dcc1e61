"""Supervision of the workers: the pool of all models, the state machine of each, and their grants of memory."""
