"""`mlxctl doctor`: checks whether this machine can run mlxd well."""

from typing import TYPE_CHECKING, Final

import typer

from gateway.ctl.tables import Json, print_json
from gateway.state_dir import default_home

if TYPE_CHECKING:
    from gateway.ctl.doctor.checks import DoctorFinding

_MARKS: Final = {"ok": "ok  ", "warn": "WARN", "bad": "BAD ", "skip": "-   "}
_COLORS: Final = {"ok": "green", "warn": "yellow", "bad": "red", "skip": "bright_black"}


def doctor(json: Json = False) -> None:
    """Check the machine, the home and the daemon, and say what to do. Exit status 1 when something will not work.

    Example: mlxctl doctor
    """
    from gateway.ctl.doctor.machine_facts import examine, run_command

    report(list(examine(default_home(), run_command)), json)


def report(findings: "list[DoctorFinding]", json: bool) -> None:
    """Print findings. Exits with status 1 if one is bad."""
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
