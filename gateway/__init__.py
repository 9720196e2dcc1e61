"""The daemon, and `mlxctl` in `gateway.ctl`."""

__all__ = ["main"]


def main() -> None:
    """The console script `mlxd`: never returns. Ctrl-C while the rest is imported is no fault."""
    import sys

    try:
        from gateway.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()
