"""`mlxctl service`: mlxd under launchd or systemd, started at boot or with a user's session."""

import os
import pwd
import sys
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from gateway.command_failed import CommandFailed
from gateway.config.settings import CONFIG_NAME, ConfigError, ServerConfig
from gateway.config.source import control_character
from gateway.ctl import logs, offline
from gateway.ctl.client import NOT_RUNNING
from gateway.ctl.tables import Json, print_json
from gateway.service import installer, launchd, systemd
from gateway.service.description import (
    PASSED_VARIABLES,
    SYSTEM_PREFIX,
    Action,
    HostFacts,
    Scope,
    Service,
    ServiceManager,
    ServiceState,
)
from gateway.service.installer import Installation, Owner, check_writers, launcher, version_of
from gateway.state_dir import default_home

app = typer.Typer(help="Install mlxd as a service, start and stop it.", no_args_is_help=True)
app.command("logs")(logs.logs)

Kind = Literal["launchd", "systemd"]

System = Annotated[bool, typer.Option("--system", help="The system service instead of this user's. Needs root.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the files and commands without writing or running them.")
]
RunAs = Annotated[str | None, typer.Option("--run-as", help="User that the system service runs as.")]
Manager = Annotated[Kind | None, typer.Option("--manager", help="With --dry-run: the service manager to show it for.")]


@app.command()
def install(
    system: System = False, run_as: RunAs = None, dry_run: DryRun = False, manager: Manager = None, json: Json = False
) -> None:
    """Install the service and start it, now and at each boot (or login, without --system).

    Example: sudo mlxctl service install --system --run-as mlxd
    """
    _do("install", system, run_as, dry_run, manager, json)


def _verb(verb: str, help: str) -> None:
    def command(system: System = False, dry_run: DryRun = False, manager: Manager = None, json: Json = False) -> None:
        _do(verb, system, None, dry_run, manager, json)

    app.command(verb, help=f"{help}\n\nExample: mlxctl service {verb}")(command)


_verb("uninstall", "Stop the service and remove it. Its home stays.")
_verb("start", "Start the service.")
_verb("stop", "Stop the service and all workers, after running requests have finished.")
_verb("restart", "Restart the gateway alone: requests finish first, and the workers keep their models.")


@app.command()
def status(system: System = False, json: Json = False) -> None:
    """Show the service manager's status. Exit status 3 if the service does not run.

    Example: mlxctl service status --json
    """
    service, kind = _find(system, None, needs_user=False), _manager_of(None)
    question = kind.status_command(service)
    try:
        _, output = installer.RealMachine().run(question)
    except OSError as error:
        raise CommandFailed(f"{question[0]}: {error.strerror}") from None
    facts = _with_versions(kind.facts(output), service)
    if json:
        print_json(facts)
    else:
        pid = f", pid {facts.pid}" if facts.pid else ""
        typer.echo(f"{facts.state}{pid}" if facts.is_installed else "not installed")
        if facts.version:
            running = f" ({facts.running} runs)" if facts.running not in ("", facts.version) else ""
            typer.echo(f"version {facts.version}{running}")
    if not facts.pid:
        raise typer.Exit(NOT_RUNNING)


@app.command("wired-limit")
def wired_limit(
    gib: Annotated[
        float | None,
        typer.Argument(
            min=0, help="GiB of memory for the GPU; 0 leaves it to the system.", show_default="the memory budget"
        ),
    ] = None,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Set how much memory the GPU may hold on a Mac, now and at each boot.

    Without a number, set the configured memory budget, or the most that leaves the system enough.

    Example: sudo mlxctl service wired-limit 96
    """
    import psutil

    from gateway.ctl.doctor.checks import wired_limit as judge

    ram = psutil.virtual_memory().total
    megabytes = (_wanted_wired(ram) if gib is None else round(gib * 1024**3)) // 1024**2
    finding = judge(str(megabytes), ram)
    if not dry_run:
        if sys.platform != "darwin":
            raise CommandFailed("wired-limit is for macOS; --dry-run shows what it would do")
        if os.geteuid() != 0:
            raise CommandFailed("this needs root: sudo mlxctl service wired-limit ...")
        if finding.level == "warn":
            raise CommandFailed(f"{finding.text}: {finding.advice}")
    actions = launchd.set_wired_limit(megabytes) if megabytes else launchd.drop_wired_limit()
    _carry_out(actions, dry_run, json)


def _wanted_wired(ram: int) -> int:
    from gateway.ctl.doctor.checks import wired_max

    budget = offline.read_config().memory.budget_bytes
    return wired_max(ram) if budget == "auto" else budget


def _do(verb: str, system: bool, run_as: str | None, dry_run: bool, manager: Kind | None, json: bool) -> None:
    if manager is not None and not dry_run:
        raise typer.BadParameter("another system's service can only be shown; add --dry-run", param_hint="--manager")
    service = _find(system, run_as, needs_user=verb == "install")
    installation = Installation(service.prefix)
    actions: list[Action] = getattr(_manager_of(manager), verb)(service)
    if verb == "install":
        if system and (warning := check_writers(Path(sys.prefix), service.uid)):
            typer.echo(f"mlxctl: warning: {warning}", err=True)
        actions[:0] = installation.link(Path(sys.prefix), Owner(str(service.home), service.user))
    elif verb == "uninstall":
        actions += installation.unlink()
    if system and not dry_run and os.geteuid() != 0:
        raise CommandFailed(f"--system needs root: sudo mlxctl service {verb} --system")
    _carry_out(actions, dry_run, json)


def _with_versions(facts: HostFacts, service: Service) -> ServiceState:
    os.environ["MLXD_HOME"] = str(service.home)
    daemon = offline.daemon()
    return ServiceState(
        **msgspec.structs.asdict(facts),
        version=version_of(Installation(service.prefix).environment),
        running=daemon.version if daemon is not None else "",
    )


def _carry_out(actions: list[Action], dry_run: bool, json: bool) -> None:
    """Carry out the actions, or print them with `--dry-run`. Raises `CommandFailed`."""
    if not dry_run:
        installer.carry_out(actions, installer.RealMachine())
    if json:
        # msgspec encodes no paths.
        print_json({"done": not dry_run, "actions": msgspec.to_builtins(actions, enc_hook=str)})
    elif dry_run:
        typer.echo(installer.describe(actions))


def _manager_of(kind: Kind | None) -> ServiceManager:
    """Return the module of the named service manager, or of this system's."""
    manager = kind or ("launchd" if sys.platform == "darwin" else "systemd")
    return launchd if manager == "launchd" else systemd


def _find(system: bool, run_as: str | None, *, needs_user: bool) -> Service:
    """Return the service that a verb acts on. Raises `CommandFailed`."""
    if run_as is not None and not system:
        raise CommandFailed("--run-as goes with --system; a user's service runs as that user")
    if system and needs_user and run_as is None:
        raise CommandFailed(
            "--system needs --run-as USER, a user without other rights (docs/service.md says how to make one)"
        )
    scope = Scope.SYSTEM if system else Scope.USER
    owner = Installation(SYSTEM_PREFIX).owner if system and run_as is None else None
    name = run_as or (owner.user if owner else None)
    try:
        user = pwd.getpwnam(name) if name else pwd.getpwuid(os.getuid())
    except KeyError:
        raise CommandFailed(f"there is no user {name!r} (docs/service.md says how to make one)") from None
    user_home = Path(user.pw_dir)
    home = default_home() if "MLXD_HOME" in os.environ or not run_as else user_home / ".mlxd"
    if owner is not None:
        home = Path(owner.home)
    for path in (home, user_home):
        if control := control_character(str(path)):
            raise CommandFailed(f"{str(path)!r} has the control character {control}, which no service's file can hold")
    return Service(
        program=launcher(SYSTEM_PREFIX if system else home),
        home=home,
        user=user.pw_name,
        uid=user.pw_uid,
        user_home=user_home,
        scope=scope,
        drain_s=_drain_s(home),
        variables=_variables(),
    )


def _variables() -> tuple[tuple[str, str], ...]:
    """Return the variables of this environment that the service gets too. Raises `CommandFailed`."""
    passed = {name: value for name in PASSED_VARIABLES if (value := os.environ.get(name))}
    for name, value in passed.items():
        if control := control_character(value):
            raise CommandFailed(f"{name} has the control character {control}, which no service's file can hold")
    return tuple(passed.items())


def _drain_s(home: Path) -> float:
    """Return the configured drain deadline, or the default if the configuration cannot be read."""
    try:
        if not (home / CONFIG_NAME).is_file():
            return ServerConfig().drain_s  # a pipe would never end
        return offline.read_config(home=home).server.drain_s
    except ConfigError:
        return ServerConfig().drain_s
