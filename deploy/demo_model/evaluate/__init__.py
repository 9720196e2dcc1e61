"""Measurements of the demo model on held-out samples, and of a server's speed."""
