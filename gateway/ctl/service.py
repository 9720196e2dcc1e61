"""`mlxctl service`: mlxd under launchd or systemd, started at boot or with a user's session."""

import os
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from gateway.ctl import logs
from gateway.ctl.client import NOT_RUNNING
from gateway.ctl.model_verbs import offline
from gateway.ctl.printing import Json, print_json
from gateway.ctl.service_target import DryRun, Kind, System, carry_out, find, manager_of, needs_root
from gateway.failed import CommandFailed
from gateway.service.description import Action, HostFacts, Service, ServiceState

app = typer.Typer(help="Install mlxd as a service, start and stop it.", no_args_is_help=True)
app.command("logs")(logs.logs)

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
    from gateway.service.executor import RealMachine

    service, kind = find(system, None, needs_user=False), manager_of(None)
    question = kind.ask(service)
    try:
        _, output = RealMachine().run(question)
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
    from gateway.service import launchd

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
    carry_out(actions, dry_run, json)


def _wanted_wired(ram: int) -> int:
    from gateway.ctl.doctor.checks import wired_max

    budget = offline.read_config().memory.budget_bytes
    return wired_max(ram) if budget == "auto" else budget


def _do(verb: str, system: bool, run_as: str | None, dry_run: bool, manager: Kind | None, json: bool) -> None:
    from gateway.service.installation import Installation, Owner, check_writers

    if manager is not None and not dry_run:
        raise typer.BadParameter("another system's service can only be shown; add --dry-run", param_hint="--manager")
    service = find(system, run_as, needs_user=verb == "install")
    installation = Installation(service.prefix)
    actions: list[Action] = getattr(manager_of(manager), verb)(service)
    if verb == "install":
        if system and (warning := check_writers(Path(sys.prefix), service.uid)):
            typer.echo(f"mlxctl: warning: {warning}", err=True)
        actions[:0] = installation.link(Path(sys.prefix), Owner(str(service.home), service.user))
    elif verb == "uninstall":
        actions += installation.unlink()
    if system and not dry_run:
        needs_root(verb)
    carry_out(actions, dry_run, json)


def _with_versions(facts: HostFacts, service: Service) -> ServiceState:
    from gateway.service.installation import Installation, version_of

    os.environ["MLXD_HOME"] = str(service.home)
    daemon = offline.daemon()
    return ServiceState(
        **msgspec.structs.asdict(facts),
        version=version_of(Installation(service.prefix).environment),
        running=daemon.version if daemon is not None else "",
    )
