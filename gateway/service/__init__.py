"""mlxd as a service of the system: one description, rendered for launchd and for systemd."""
