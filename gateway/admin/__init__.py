"""Admin API of the control socket: status, requests and commands."""
