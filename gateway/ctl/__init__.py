"""`mlxctl`: what runs, and what should. Imports little, so that it starts at once.

Exit statuses: 0 done · 1 the daemon said no · 2 bad command line · 3 the daemon does not run · 130 Ctrl-C.
"""

__all__ = ["main"]


def main() -> None:
    """The console script. What a verb raises as `CommandFailed` is one line on stderr and an exit status."""
    import sys

    try:
        from gateway.ctl.cli import app
        from gateway.failed import CommandFailed
    except KeyboardInterrupt:
        # As a verb that is stopped ends, where it has begun.
        sys.exit(130)

    try:
        app(prog_name="mlxctl")
    except CommandFailed as failed:
        print(f"mlxctl: {failed}", file=sys.stderr)
        sys.exit(failed.status)
