"""`mlxctl calibrate`: measures a model in a separate process and stores the results for the model's next worker."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import IO, Annotated, Final

import msgspec
import typer

from gateway.command_failed import CommandFailed
from gateway.config.settings import Config, ModelConfig
from gateway.config.worker_spec_and_group import worker_spec
from gateway.ctl.offline import Model, check_room, model_of, read_config, running_models
from gateway.ctl.tables import Anyway, Json, records, size
from protocol.spec import STDIN, WorkerSpec
from protocol.timing_profile import FOLDER_ENV, CalibrationResult, profiles_dir

SECONDS: Final = 60.0
_finding = msgspec.json.Decoder(CalibrationResult)


def calibrate(
    model: Model,
    seconds: Annotated[
        float, typer.Option(min=1.0, max=3600.0, help="Time for all measurements together, beside the load.")
    ] = SECONDS,
    yes: Anyway = False,
    json: Json = False,
) -> None:
    """Measure how quick a model is here, and keep it: numbers of rows, prompts, chunks, drafts and free buffers.

    The model is loaded once more, in a process of its own, for as long as this takes; its next worker uses the results.
    `max_running = "auto"` is the batch size beyond which doubling it adds less than 10 %.

    Example: mlxctl calibrate demo --seconds 20
    """
    config = read_config()
    configured = model_of(config, model)
    if configured.group.ranks:
        raise CommandFailed(
            f"{configured.name} is run by a group of processes: a model of one process can be calibrated"
        )
    if not json and any(each.name == configured.name and each.pid for each in running_models() or ()):
        typer.echo(f"{configured.name} is loaded in the daemon too: what it serves meanwhile makes the figures worse.")
    if not yes:
        check_room(configured)
    for finding in findings(config, configured, seconds):
        typer.echo(msgspec.json.encode(finding).decode() if json else line(finding))


def findings(config: Config, model: ModelConfig, seconds: float) -> Iterator[CalibrationResult]:
    """Yield each measurement as soon as it is taken. Raises `CommandFailed`."""
    argv = [sys.executable, "-P", "-m", "worker.tools.calibrate", "--spec", STDIN, "--seconds", str(seconds)]
    environment = {**os.environ, FOLDER_ENV: str(profiles_dir(config.home))}
    with spec_input(worker_spec(config, model)) as stdin:
        process = subprocess.Popen(argv, stdin=stdin, stdout=subprocess.PIPE, env=environment)
    with process:
        assert process.stdout is not None
        yield from records(process.stdout, _finding)
    if process.returncode:
        raise CommandFailed(f"the model could not be calibrated (exit status {process.returncode})")


@contextmanager
def spec_input(spec: WorkerSpec) -> Generator[IO[bytes], None, None]:
    """Yield a file that contains the specification as JSON, to be the standard input of a worker's tool."""
    with tempfile.TemporaryFile() as stdin:
        stdin.write(msgspec.json.encode(spec))
        stdin.seek(0)
        yield stdin


def line(finding: CalibrationResult) -> str:
    """Format one measurement as a line for people."""
    match finding.kind:
        case "decode":
            return f"{finding.size:>6} rows     {finding.tokens_per_s:>10.1f} tok/s"
        case "prefill":
            return f"{finding.size:>6} prompt   {finding.tokens_per_s:>10.1f} tok/s"
        case "buffers":
            return f"free buffers: {size(finding.size)}"
        case _:
            return f"max_running: {finding.size} are enough"
