"""The daemon, and `mlxctl` in `gateway.ctl`."""

__all__ = ["main"]


def main() -> None:
    """Run the console script `mlxd`, which never returns. Ctrl-C during the imports exits without a traceback."""
    import sys

    try:
        from gateway.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()
