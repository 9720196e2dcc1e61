"""The launchd or systemd service: description, installation and removal."""
