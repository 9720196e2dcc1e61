"""`mlxctl drain`: finishes running requests, then ends the daemon."""

import time
from typing import Annotated, Final

import typer
from msgspec import Struct

from gateway.command_failed import CommandFailed
from gateway.control_types import DrainResult
from gateway.ctl import client
from gateway.ctl.offline import is_running
from gateway.ctl.tables import Json, print_json, print_result, seconds

POLL_S: Final = 0.05
# A worker with much memory takes long to exit after the last request.
STOP_S: Final = 600.0


class Result(Struct, frozen=True):
    """Result of a drain. `cut_off` counts requests that were still running, or waiting for a load, at the deadline."""

    pid: int
    took_s: float
    cut_off: int


def drain(
    timeout: Annotated[
        str | None,
        typer.Option(
            help="Time that running requests get, such as 5m. Default: drain of [server].", show_default=False
        ),
    ] = None,
    stay: Annotated[
        bool, typer.Option("--stay", help="Do not end the daemon: it refuses new requests until mlxctl undrain.")
    ] = False,
    json: Json = False,
) -> None:
    """Refuse new requests, let the running ones finish, and end the daemon. Exit status 1 if some did not finish.

    Example: mlxctl drain --timeout 5m
    """
    timeout_s = None if timeout is None else seconds(timeout, "--timeout")
    if stay:
        _pause(timeout_s, json)
        return
    done = _drain(timeout_s, is_quiet=json)
    if json:
        print_json(done)
    elif done.cut_off:
        typer.echo(f"mlxd has stopped; requests that did not finish: {done.cut_off}", err=True)
    else:
        typer.echo(f"mlxd has stopped after {done.took_s:.1f} s; every request finished")
    if done.cut_off:
        raise typer.Exit(1)


def undrain(json: Json = False) -> None:
    """Take requests again after mlxctl drain --stay.

    Example: mlxctl undrain
    """
    print_result(client.post("/v1/undrain", {}, DrainResult), "mlxd takes requests again", json)


def _pause(timeout_s: float | None, json: bool) -> None:
    left = client.post("/v1/drain", {"timeout_s": timeout_s, "stays": True}, DrainResult)
    still = f"; requests that still run: {left.cut_off}" if left.cut_off else "; nothing runs"
    print_result(left, f"mlxd takes no new requests until mlxctl undrain{still}", json)
    if left.cut_off:
        raise typer.Exit(1)


def _drain(timeout_s: float | None, *, is_quiet: bool) -> Result:
    status = client.status()
    if (inside := sum(model.inside for model in status.models)) and not is_quiet:
        counted = "1 request is" if inside == 1 else f"{inside} requests are"
        typer.echo(f"{counted} running or waiting; new ones are refused from now on", err=True)
    began = time.monotonic()
    done = client.post("/v1/drain", {"timeout_s": timeout_s}, DrainResult)
    # The deadline starts after the last request: from here on only workers have to exit.
    deadline = time.monotonic() + STOP_S
    while is_running(status.pid):
        if time.monotonic() > deadline:
            raise CommandFailed(f"mlxd (pid {status.pid}) has finished its requests but does not exit")
        time.sleep(POLL_S)
    return Result(status.pid, round(time.monotonic() - began, 2), done.cut_off)
