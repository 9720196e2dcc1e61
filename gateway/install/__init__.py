"""Installation as a service of the system, and its upgrades."""
