"""Deterministic simulation of the gateway: the real code on a virtual clock, with workers and faults of ours."""
