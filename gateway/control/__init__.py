"""Admin API of the unix socket: state of the daemon, and commands of operators."""
