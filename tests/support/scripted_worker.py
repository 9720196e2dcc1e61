"""The command that starts a scripted worker.

A module of its own, without pytest: each scripted daemon imports it.
"""

import sys
from pathlib import Path

import msgspec

from gateway.workers.supervisor.spawn import Command
from protocol.spec import WorkerSpec

SCRIPTED = Path(__file__).parents[1] / "workers" / "scripted.py"


def scripted(*options: str) -> Command:
    """The command of a scripted worker. An option `NAME:--flag` is for the model NAME only."""

    def command(spec: WorkerSpec) -> list[str]:
        own = [o.removeprefix(f"{spec.name}:") for o in options if o.startswith((f"{spec.name}:", "--"))]
        argv = [part for option in own for part in option.split()]
        return [sys.executable, "-P", str(SCRIPTED), spec.name, "--spec", msgspec.json.encode(spec).decode(), *argv]

    return command
