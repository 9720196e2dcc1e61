"""`mlxctl logs`: the daemon's log files, formatted or raw. It needs no daemon."""

import time
from collections.abc import Iterable
from typing import Annotated, Any, Final

import typer

from gateway.command_failed import CommandFailed
from gateway.ctl.offline import model_argument
from gateway.ctl.tables import Json
from gateway.state_dir import audit_path, default_home, log_path
from gateway.telemetry import logs as log_file
from gateway.telemetry.logs import escaped, is_about, read_line

POLL_S: Final = 0.2
_HEAD: Final = ("time", "level", "logger", "message", "exception")
_AUDIT_HEAD: Final = ("time", "action", "target")


def logs(
    model: Annotated[str | None, model_argument("Only lines about this model.", "MODEL")] = None,
    audit: Annotated[
        bool,
        typer.Option("--audit", help="Show the audit log: changes of keys, commands, reloads, new addresses of keys."),
    ] = False,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Follow the log until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("-n", "--lines", min=0, help="Number of the last lines to show.")] = 50,
    json: Json = False,
) -> None:
    """Show the last lines of the daemon's log, or of the audit log.

    Example: mlxctl logs -f coder
    """
    path = audit_path(default_home()) if audit else log_path(default_home())
    if not path.parent.exists():
        raise CommandFailed(f"no log at {path}; does mlxd use another home (MLXD_HOME)?")
    people = plain_audit if audit else plain

    def show(found: Iterable[str]) -> int:
        shown = 0
        for line in found:
            if model is None or is_about(line, model):
                typer.echo(line if json else people(line))
                shown += 1
        return shown

    # Following starts before the last lines are read, so that a line written in between is shown twice rather than
    # never.
    newer = log_file.follow(path, lambda: time.sleep(POLL_S))
    shown = show(log_file.last_lines(path, lines, lambda line: model is None or is_about(line, model)))
    if model is not None and not shown and lines and not follow:
        raise CommandFailed(f"no line of {path} is about a model {model}")
    if follow:
        try:
            show(newer)
        except KeyboardInterrupt:
            return


def plain(line: str) -> str:
    """Format one JSON log line for people. A line that is no JSON object is returned unchanged."""
    fields = read_line(line)
    if fields is None:
        return line
    rest = "".join(f" {key}={value}" for key, value in fields.items() if key not in _HEAD and value is not None)
    text = f"{fields.get('time', '')} {fields.get('level', ''):<7} {str(fields.get('message', '')).rstrip()}{rest}"
    if trace := fields.get("exception"):
        text += f"\n{trace}"
    # The line may quote a client or a worker, so its control characters are escaped.
    return escaped(text)


def plain_audit(line: str) -> str:
    """Format one line of the audit log for people."""
    fields = read_line(line)
    if fields is None:
        return escaped(line)
    facts: dict[str, Any] = fields.get("facts") or {}
    rest = {key: value for key, value in fields.items() if key not in (*_AUDIT_HEAD, "facts")} | facts
    facts_text = "".join(f" {key}={value}" for key, value in rest.items() if value not in (None, ""))
    return escaped(f"{fields.get('time', '')} {fields.get('action', ''):<14} {fields.get('target') or '-'}{facts_text}")
