"""`mlxctl service upgrade` and `rollback`: another version, tried before it serves, and the way back."""

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from msgspec import Struct

from gateway.admin_types import Done, Status
from gateway.ctl import client, offline
from gateway.ctl.printing import Json, tell
from gateway.ctl.service.service_target import DryRun, System, carry_out, find, manager_of, needs_root
from gateway.failed import Failed

if TYPE_CHECKING:
    from collections.abc import Callable

    from gateway.install.description import Service
    from gateway.install.upgrade import Seen, Upgrade, Wanted

DEADLINE_S: Final = 300.0
READYZ_TIMEOUT_S: Final = 10.0

Deadline = Annotated[
    float, typer.Option(min=1, help="Seconds within which the new version must be ready before it is rolled back.")
]


class Changed(Struct, frozen=True):
    """The output of `--json`."""

    version: str
    previous: str
    environment: str


def upgrade(
    target: Annotated[
        str | None,
        typer.Argument(help="Version, wheel, checkout or address; the newest version by default.", metavar="TARGET"),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option("--from", help="Source of versions: a folder of wheels, an index' address, or pypi; remembered."),
    ] = None,
    system: System = False,
    deadline: Deadline = DEADLINE_S,
    keep: Annotated[int, typer.Option(min=1, help="Number of versions to keep on disk.")] = 3,
    keep_workers: Annotated[
        bool,
        typer.Option("--keep-workers", help="Keep loaded models on the old code until they are loaded again."),
    ] = False,
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Install another version beside this one, try it, switch to it with models kept, and back if it is not ready.

    Example: mlxctl service upgrade 0.2.0 --from ./wheels
    """
    from gateway.install import releases
    from gateway.install.upgrade import plan

    service = _installed("upgrade", system, dry_run)
    if foreign := releases.foreign(Path(sys.prefix)):
        raise Failed(foreign)
    wanted = _wanted(service, target, source, keep=keep, deadline_s=deadline, keep_workers=keep_workers)
    if dry_run:
        carry_out(list(plan(service, manager_of(None), wanted)), dry_run, json)
    else:
        _change(service, json, lambda change: change.run(wanted))


def rollback(system: System = False, deadline: Deadline = DEADLINE_S, json: Json = False) -> None:
    """Switch to the version before, with the same checks. A second time goes forth again.

    Example: mlxctl service rollback
    """
    service = _installed("rollback", system, False)
    _change(service, json, lambda change: change.back(deadline))


class Daemon:
    """The service's daemon, over its admin socket and its port."""

    def look(self) -> "Seen | None":
        from gateway.install.upgrade import Seen

        status = offline.daemon()
        env = None if status is None else _env_of(status.pid)
        return None if status is None or env is None else Seen(status.pid, env, _missing(status))

    def complete(self) -> None:
        from gateway.ctl.doctor.look import completion

        finding = completion(client.status())
        if finding.level == "bad":
            raise Failed(finding.text)

    def roll(self, env: Path) -> list[str]:
        old = [model for model in client.status().models if model.pid and _env_of(model.pid) != env]
        for model in sorted(old, key=lambda model: model.running + model.waiting):
            client.post("/v1/models/restart", {"model": model.name}, Done)
        return [model.name for model in old]

    def in_use(self) -> set[Path]:
        import psutil

        return {env for pid in psutil.pids() if (env := _env_of(pid)) is not None}


def _change(service: "Service", json: bool, act: "Callable[[Upgrade], Path]") -> None:
    from gateway.install.executor import RealMachine
    from gateway.install.releases import Releases, version_of
    from gateway.install.upgrade import Upgrade

    if os.geteuid() == 0:
        # The service's user must be able to read what root installs, whatever root's own mask is.
        os.umask(0o022)
    # The client asks the daemon of this home.
    os.environ["MLXD_HOME"] = str(service.home)

    env = act(Upgrade(service, manager_of(None), RealMachine(), Daemon(), lambda line: typer.echo(line, err=json)))
    changed = Changed(version_of(env), version_of(Releases(service.prefix).previous), str(env))
    text = f"{changed.version} serves; mlxctl service rollback goes back to {changed.previous}"
    if Path(sys.prefix).resolve() != env:
        text += f"\nits mlxctl is {service.prefix}/current/bin/mlxctl"
    tell(changed, text, json)


def _installed(verb: str, system: bool, dry_run: bool) -> "Service":
    service = find(system, None, needs_user=False)
    if system and not dry_run:
        needs_root(verb)
    if not (service.prefix / "current").is_symlink():
        flag = " --system" if system else ""
        raise Failed(f"no service is installed (no {service.prefix}/current): mlxctl service install{flag}")
    return service


def _wanted(
    service: "Service", target: str | None, find_at: str | None, *, keep: int, deadline_s: float, keep_workers: bool
) -> "Wanted":
    from importlib.metadata import distributions

    from gateway.install import fetch, releases
    from gateway.install.upgrade import Wanted

    known = releases.Releases(service.prefix)
    last = releases.read(known.current) if known.current else None
    extra = releases.extra({found.name for found in distributions()})
    source = fetch.source(target, find_at, last.find if last else "", extra)
    # The interpreter itself, not an environment's link to it, which may be removed some day.
    base = Path(sys.executable).resolve()
    return Wanted(source, base, shutil.which("uv"), keep, deadline_s, keep_workers)


def _missing(status: Status) -> str:
    """Reason why the daemon is not ready, from its own port."""
    import httpx

    if status.is_draining:
        return "draining"
    try:
        # A certificate that is not for this address is as good here, and nothing secret is sent.
        answer = httpx.get(f"{status.url}/readyz", timeout=READYZ_TIMEOUT_S, trust_env=False, verify=False)
    except httpx.HTTPError as error:
        return f"{status.url}/readyz: {error}"
    return "" if answer.status_code == 200 else answer.text[:200]


def _env_of(pid: int) -> Path | None:
    """The environment whose python runs a process; None when it is not one, or has ended."""
    import psutil

    try:
        command = psutil.Process(pid).cmdline()
    except psutil.Error:
        return None
    program = Path(command[0]) if command else Path()
    return program.parent.parent if program.is_absolute() and program.parent.name == "bin" else None
