"""The measurement of the demo model on held-out samples, and of the speed of a server."""
