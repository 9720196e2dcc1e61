"""`mlxctl service`: mlxd under launchd or systemd, before anybody logs in or with a user's session."""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from gateway.ctl import logs
from gateway.ctl.say import Json, ask, print_json

if TYPE_CHECKING:
    from pathlib import Path

    from gateway.service.description import Action, Service

Kind = Literal["launchd", "systemd"]

app = typer.Typer(help="Install mlxd as a service, start and end it.", no_args_is_help=True)
app.command("logs")(logs.logs)

System = Annotated[bool, typer.Option("--system", help="The machine's service, not this user's. Needs root.")]
RunAs = Annotated[str | None, typer.Option("--run-as", help="The user that the machine's service runs as.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only print what would be written and run.")]
Manager = Annotated[Kind | None, typer.Option("--manager", help="With --dry-run: as on another system.")]


@app.command()
def install(system: System = False, run_as: RunAs = None, dry_run: DryRun = False, manager: Manager = None) -> None:
    """Install the service and start it, now and at each boot (or login, without --system).

    Example: sudo mlxctl service install --system --run-as mlxd
    """
    _do("install", system, run_as, dry_run, manager)


@app.command()
def uninstall(system: System = False, dry_run: DryRun = False, manager: Manager = None) -> None:
    """End the service and remove it. Its home stays as it is.

    Example: mlxctl service uninstall
    """
    _do("uninstall", system, None, dry_run, manager)


@app.command()
def start(system: System = False, dry_run: DryRun = False, manager: Manager = None) -> None:
    """Start the service.

    Example: mlxctl service start
    """
    _do("start", system, None, dry_run, manager)


@app.command()
def stop(system: System = False, dry_run: DryRun = False, manager: Manager = None) -> None:
    """Let running requests finish, end all workers and the service.

    Example: mlxctl service stop
    """
    _do("stop", system, None, dry_run, manager)


@app.command()
def restart(system: System = False, dry_run: DryRun = False, manager: Manager = None) -> None:
    """Restart the gateway alone: requests finish first, and the workers keep their models.

    Example: mlxctl service restart
    """
    _do("restart", system, None, dry_run, manager)


@app.command()
def status(system: System = False, json: Json = False) -> None:
    """Show what the service manager says. Exit status 3 when the service does not run.

    Example: mlxctl service status --json
    """
    from gateway.ctl.client import NOT_RUNNING, Failed
    from gateway.service.machine import RealMachine

    service, kind = ask(lambda: _service(system, None, needs_user=False)), _manager(None)

    def look() -> str:
        try:
            return RealMachine().run(kind.ask(service))[1]
        except OSError as error:
            raise Failed(f"{kind.ask(service)[0]}: {error.strerror}") from None

    facts = kind.facts(ask(look))
    if json:
        print_json(facts)
    else:
        pid = f", pid {facts.pid}" if facts.pid else ""
        typer.echo(f"{facts.state}{pid}" if facts.is_installed else "not installed")
    if not facts.pid:
        raise typer.Exit(NOT_RUNNING)


@app.command("wired-limit")
def wired_limit(
    gib: Annotated[float, typer.Argument(min=0, help="GiB of memory for the GPU; 0 leaves it to the system.")],
    dry_run: DryRun = False,
) -> None:
    """Set how much memory the GPU may hold on a Mac, now and at each boot.

    Example: sudo mlxctl service wired-limit 96
    """
    import os

    import psutil

    from gateway.doctor import wired_limit as judge
    from gateway.service import launchd

    megabytes = round(gib * 1024)
    finding = judge(str(megabytes), psutil.virtual_memory().total)
    if not dry_run:
        _refuse_if(sys.platform != "darwin", "wired-limit is for macOS; --dry-run shows what it would do")
        _refuse_if(os.geteuid() != 0, "this needs root: sudo mlxctl service wired-limit ...")
        _refuse_if(finding.level == "warn", f"{finding.text}: {finding.advice}")
    actions = launchd.set_wired_limit(megabytes) if megabytes else launchd.drop_wired_limit()
    _carry_out(actions, dry_run)


def _refuse_if(is_so: bool, why: str) -> None:
    from gateway.ctl.client import Failed

    def refuse() -> None:
        if is_so:
            raise Failed(why)

    ask(refuse)


def _do(verb: str, system: bool, run_as: str | None, dry_run: bool, manager: Kind | None) -> None:
    import os

    if manager is not None and not dry_run:
        raise typer.BadParameter("another system's service can only be shown; add --dry-run", param_hint="--manager")
    service = ask(lambda: _service(system, run_as, needs_user=verb == "install"))
    actions: list[Action] = getattr(_manager(manager), verb)(service)
    is_refused = system and not dry_run and os.geteuid() != 0
    _refuse_if(is_refused, f"--system needs root: sudo mlxctl service {verb} --system")
    _carry_out(actions, dry_run)


def _carry_out(actions: "list[Action]", dry_run: bool) -> None:
    from gateway.ctl.client import Failed
    from gateway.service.machine import RealMachine, ServiceFailed, carry_out, describe

    if dry_run:
        typer.echo(describe(actions))
        return

    def run() -> None:
        try:
            carry_out(actions, RealMachine())
        except ServiceFailed as error:
            raise Failed(str(error)) from None

    ask(run)


def _manager(kind: Kind | None) -> ModuleType:
    from gateway.service import launchd, systemd

    found = kind or ("launchd" if sys.platform == "darwin" else "systemd")
    return launchd if found == "launchd" else systemd


def _service(system: bool, run_as: str | None, *, needs_user: bool) -> "Service":
    """Raises `Failed`."""
    import os
    import pwd
    from pathlib import Path

    from gateway.config import default_home
    from gateway.ctl.client import Failed
    from gateway.service.description import Scope, Service

    if run_as is not None and not system:
        raise Failed("--run-as goes with --system; a user's service runs as that user")
    if system and needs_user and run_as is None:
        raise Failed("--system needs --run-as USER, a user without other rights (docs/service.md says how to make one)")
    try:
        user = pwd.getpwnam(run_as) if run_as else pwd.getpwuid(os.getuid())
    except KeyError:
        raise Failed(f"there is no user {run_as!r} (docs/service.md says how to make one)") from None
    user_home = Path(user.pw_dir)
    home = default_home() if "MLXD_HOME" in os.environ or not run_as else user_home / ".mlxd"
    return Service(
        # The environment's own python: a wrapper such as uv would be the process that is signalled.
        program=(sys.executable, "-P", "-m", "gateway.main"),
        home=home,
        user=user.pw_name,
        uid=user.pw_uid,
        user_home=user_home,
        scope=Scope.SYSTEM if system else Scope.USER,
        drain_s=_drain_s(home),
    )


def _drain_s(home: "Path") -> float:
    """What the configuration says, if it can be read by now."""
    from gateway.config import ConfigError, ServerConfig
    from gateway.configread import load_config

    try:
        return load_config(home).server.drain_s
    except ConfigError:
        return ServerConfig().drain_s
