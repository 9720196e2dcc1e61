"""`mlxctl`: what runs, and what should. Imports little, so that it starts at once.

Exit statuses: 0 done · 1 the daemon said no · 2 bad command line · 3 the daemon does not run.
"""


def main() -> None:
    """The console script."""
    from gateway.ctl.cli import app

    app(prog_name="mlxctl")
