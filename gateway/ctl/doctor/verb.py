"""`mlxctl doctor`: whether this machine will do."""

from typing import Final

import typer

from gateway.ctl.printing import Json, print_json

_MARKS: Final = {"ok": "ok  ", "warn": "WARN", "bad": "BAD ", "skip": "-   "}
_COLORS: Final = {"ok": "green", "warn": "yellow", "bad": "red", "skip": "bright_black"}


def doctor(json: Json = False) -> None:
    """Check the machine, the home and the daemon, and say what to do. Exit status 1 when something will not work.

    Example: mlxctl doctor
    """
    from gateway.config.settings import default_home
    from gateway.ctl.doctor.look import examine, say

    findings = list(examine(default_home(), say))
    if json:
        print_json(findings)
    else:
        for finding in findings:
            typer.secho(_MARKS[finding.level], fg=_COLORS[finding.level], nl=False)
            typer.echo(f" {finding.name}: {finding.text}")
            if finding.advice:
                typer.echo(f"       {finding.advice}")
    if any(finding.level == "bad" for finding in findings):
        raise typer.Exit(1)
