"""Checks at the load that a quick path gives the same tokens as the plain one."""
