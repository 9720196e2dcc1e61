"""`mlxctl`, the command line of mlxd. It imports little, so that it starts quickly.

Exit statuses: 0 done · 1 the daemon refused · 2 bad command line · 3 the daemon does not run · 130 Ctrl-C.
"""

__all__ = ["main"]


def main() -> None:
    """Run the console script. A verb's `CommandFailed` becomes one line on stderr and an exit status."""
    import sys

    try:
        from gateway.command_failed import CommandFailed
        from gateway.ctl.cli import app, command_of
    except KeyboardInterrupt:
        # Verbs exit with the same status on Ctrl-C.
        sys.exit(130)

    try:
        command_of(app)(prog_name="mlxctl")
    except CommandFailed as failed:
        print(f"mlxctl: {failed}", file=sys.stderr)
        sys.exit(failed.status)
