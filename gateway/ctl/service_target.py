"""The installed service that a verb acts on, and the execution of its actions."""

import os
import pwd
import sys
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from gateway.access.key_file import has_keys
from gateway.config.settings import ConfigError, ServerConfig
from gateway.ctl.printing import print_json
from gateway.failed import CommandFailed
from gateway.service.description import SYSTEM_PREFIX, Action, Manager, Scope, Service
from gateway.state_dir.home_paths import default_home

Kind = Literal["launchd", "systemd"]

System = Annotated[bool, typer.Option("--system", help="The system service instead of this user's. Needs root.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the files and commands without writing or running them.")
]


def carry_out(actions: list[Action], dry_run: bool, json: bool) -> None:
    """Carry out the actions, or print them with `--dry-run`. Raises `CommandFailed`."""
    from gateway.service import executor

    if not dry_run:
        executor.carry_out(actions, executor.RealMachine())
    if json:
        # msgspec encodes no paths.
        print_json({"done": not dry_run, "actions": msgspec.to_builtins(actions, enc_hook=str)})
    elif dry_run:
        typer.echo(executor.describe(actions))


def manager_of(kind: Kind | None) -> Manager:
    """Return the module of the named service manager, or of this system's."""
    from gateway.service import launchd, systemd

    manager = kind or ("launchd" if sys.platform == "darwin" else "systemd")
    return launchd if manager == "launchd" else systemd


def find(system: bool, run_as: str | None, *, needs_user: bool) -> Service:
    """Return the service that a verb acts on. Raises `CommandFailed`."""
    from gateway.service.installation import Installation, launcher

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
    return Service(
        program=launcher(SYSTEM_PREFIX if system else home),
        home=home,
        user=user.pw_name,
        uid=user.pw_uid,
        user_home=user_home,
        scope=scope,
        drain_s=_drain_s(home),
    )


def needs_root(verb: str) -> None:
    """Raises `CommandFailed` unless the user is root."""
    if os.geteuid() != 0:
        raise CommandFailed(f"--system needs root: sudo mlxctl service {verb} --system")


def _drain_s(home: Path) -> float:
    """Return the configured drain deadline, or the default if the configuration cannot be read."""
    from gateway.config.load import load_config

    try:
        return load_config(home, has_keys=has_keys).server.drain_s
    except ConfigError:
        return ServerConfig().drain_s
