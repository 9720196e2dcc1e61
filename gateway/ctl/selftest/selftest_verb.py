"""`mlxctl selftest`: what mlxd needs of a Mac, tried with the demo model, and a report of it."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from gateway.command_failed import CommandFailed
from gateway.ctl.tables import Json

if TYPE_CHECKING:
    from gateway.ctl.selftest.report import StepResult
    from gateway.ctl.selftest.steps import SelftestStep
    from gateway.ctl.selftest.trial import Trial

# No step begins after this time.
TOTAL_S: Final = 570.0
_COLORS: Final = {"passed": "green", "failed": "red", "skipped": "bright_black"}


def selftest(
    steps: Annotated[
        list[str] | None, typer.Argument(help="Steps to run, such as: footprint tokens.", show_default="all steps")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="File for the report, in markdown and JSON, without your paths.")
    ] = None,
    json: Json = False,
) -> None:
    """Try on this machine what mlxd needs of it, with a daemon, home and label of its own. Takes up to ten minutes.

    The machine is left as it was. Exit status 1 if a step failed.

    Example: mlxctl selftest --report selftest.md
    """
    from gateway.ctl.selftest.report import as_json, markdown, report_of
    from gateway.ctl.selftest.trial import TimedMachine, trial

    chosen = list(_chosen(steps or []))
    if report is not None:
        _write(report, "")  # a file that cannot be written is an error now, not after the steps
    with trial(TimedMachine()) as running:
        found = run_steps(chosen, running)
        results = list(found if json else _shown(found))
    done = report_of(results)
    private = (Path.home(), running.root)
    if report is not None:
        _write(report, markdown(done, private))
    if json:
        typer.echo(as_json(done, private))
    else:
        typer.echo(done.summary)
        for row in done.needs_you:
            typer.echo(f"  by hand: {row.subject}" + (f": {row.command}" if row.command else ""))
    if not done.is_good:
        raise typer.Exit(1)


def run_steps(
    steps: Iterable["SelftestStep"], trial: "Trial", clock: Callable[[], float] = time.monotonic
) -> Iterator["StepResult"]:
    """Run steps one after the other, and yield the result of each. A step that breaks has failed; the next one runs."""
    from gateway.ctl.selftest.report import StepResult

    end = clock() + TOTAL_S
    for step in steps:
        if trial.platform not in step.platforms:
            yield StepResult(step.name, "skipped", "only on macOS")
        elif clock() >= end:
            yield StepResult(step.name, "skipped", f"no time is left; alone: mlxctl selftest {step.name}")
        else:
            yield _run(step, trial, clock)


def _run(step: "SelftestStep", trial: "Trial", clock: Callable[[], float]) -> "StepResult":
    from gateway.ctl.selftest.report import StepResult

    begin = clock()
    trial.begin(step.limit_s)
    try:
        step.gather(trial)
        verdict = step.judge(trial.evidence)
        outcome, text = verdict.outcome, verdict.text
    except CommandFailed as failed:
        outcome, text = "failed", str(failed)
    except _broken() as error:
        outcome, text = "failed", f"{type(error).__name__}: {error}"
    return StepResult(step.name, outcome, text, round(clock() - begin, 2), trial.evidence)


def _broken() -> tuple[type[Exception], ...]:
    """Return the errors of an untried system: its tools, its answers, and what is not where a step expects it."""
    import httpx2
    import msgspec
    import psutil

    system = (OSError, subprocess.SubprocessError, psutil.Error)
    return (*system, httpx2.HTTPError, msgspec.MsgspecError, LookupError, TypeError, ValueError)


def _chosen(names: Sequence[str]) -> Iterator["SelftestStep"]:
    """Yield the steps of those names, or all. `tokens` is those of all models. Raises `CommandFailed`."""
    from gateway.ctl.selftest.steps import STEPS, token_step

    steps = [*STEPS, *(token_step(name, path) for name, path in _installed_models())]
    unknown = [name for name in names if not any(name in (step.name, step.name.partition(":")[0]) for step in steps)]
    if unknown:
        raise CommandFailed(f"there is no step {unknown[0]!r}; there are {', '.join(step.name for step in steps)}")
    for step in steps:
        if not names or step.name in names or step.name.partition(":")[0] in names:
            yield step


def _installed_models() -> Iterator[tuple[str, str]]:
    """Yield names and paths of the models on this disk that generate text, of the user's home and hub cache."""
    from gateway.ctl.offline import readable_config
    from gateway.model_files.metadata import DEMOS, Unreadable, find, kind_of_files
    from protocol.checkpoint import TEXT

    config = readable_config()
    for model in config.models.values() if config is not None else ():
        try:
            find(model.path)
        except Unreadable:
            continue
        kind = kind_of_files(model.path) if model.kind == "auto" else model.kind
        if model.path not in DEMOS and kind == TEXT:
            yield model.name, model.path


def _shown(results: Iterator["StepResult"]) -> Iterator["StepResult"]:
    """Print each result as it comes, and on a terminal a line while the next step runs."""
    is_terminal = sys.stdout.isatty()
    for number in count(1):
        if is_terminal:
            typer.echo(f"step {number} ...", nl=False)
        result = next(results, None)
        if is_terminal:
            typer.echo("\r\033[K", nl=False)
        if result is None:
            return
        typer.secho(f"{result.outcome:<8}", fg=_COLORS[result.outcome], nl=False)
        typer.echo(f"{result.name:<16} {result.text}")
        yield result


def _write(report: Path, text: str) -> None:
    try:
        report.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandFailed(f"{report} cannot be written: {error.strerror}") from None
