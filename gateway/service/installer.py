"""Installation of the service: the actions on the machine, and the environment that the service runs in.

Carries out actions, or describes them for a dry run. Only this module touches the machine.

Environment of the installed service: the link to it, the service's owner, and the users who can change it.

`PREFIX/current` is a link to the Python environment from which `mlxctl service install` was run.
"""

import pwd
import re
import stat
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Protocol, assert_never

from msgspec import DecodeError, Struct, json

from gateway.command_failed import CommandFailed
from gateway.service.description import (
    COMMAND_TIMEOUT_S,
    Action,
    PrivateFolder,
    RemovePath,
    RunCommand,
    SymbolicLink,
    WaitUntil,
    WriteFile,
)
from gateway.state_dir import FolderRefused, private_folder

POLL_S: Final = 0.2


class ServiceFailed(CommandFailed):
    """An action on the machine failed."""


class InstallMachine(Protocol):
    """Calls to the machine that actions need. Tests implement it, because they have no launchd."""

    def run(self, argv: tuple[str, ...]) -> tuple[int, str]:
        """Run a command, and return its exit status and output."""
        ...

    def write(self, path: Path, content: str) -> None: ...
    def folder(self, path: Path, user: str) -> None: ...
    def remove(self, path: Path) -> None: ...
    def link(self, path: Path, target: Path) -> None: ...
    def pause(self) -> None: ...


def carry_out(actions: Iterable[Action], machine: InstallMachine) -> None:
    """Carry out actions in their order. Raises `ServiceFailed` at the first failure."""
    for action in actions:
        try:
            _carry_out(action, machine)
        except FolderRefused as error:
            raise ServiceFailed(str(error)) from None
        except OSError as error:
            raise ServiceFailed(f"{error.filename or ''}: {error.strerror}".lstrip(": ")) from error
        except subprocess.TimeoutExpired as error:
            raise ServiceFailed(f"{' '.join(error.cmd)} did not end within {error.timeout:.0f} s") from error


def _carry_out(action: Action, machine: InstallMachine) -> None:
    match action:
        case WriteFile(path, content):
            machine.write(path, content)
        case PrivateFolder(path, user):
            machine.folder(path, user)
        case RemovePath(path):
            machine.remove(path)
        case SymbolicLink(path, target):
            machine.link(path, target)
        case RunCommand(argv, may_fail):
            status, output = machine.run(argv)
            if status != 0 and not may_fail:
                raise ServiceFailed(f"{' '.join(argv)} ended with {status}: {output.strip()}")
        case WaitUntil(argv, pattern, deadline_s):
            end = time.monotonic() + deadline_s
            while re.search(pattern, machine.run(argv)[1]):
                if time.monotonic() > end:
                    raise ServiceFailed(f"{' '.join(argv)} has not changed within {deadline_s:.0f} s")
                machine.pause()
        case _:
            assert_never(action)


def describe(actions: Iterable[Action]) -> str:
    """Describe the actions as a person would carry them out."""
    lines: list[str] = []
    for action in actions:
        match action:
            case WriteFile(path, content):
                lines.append(f"write {path}:\n" + "".join(f"    {line}\n" for line in content.splitlines()).rstrip())
            case PrivateFolder(path, user):
                lines.append(f"make {path} for {user} alone")
            case RemovePath(path):
                lines.append(f"remove {path}")
            case SymbolicLink(path, target):
                lines.append(f"link {path} to {target}")
            case RunCommand(argv, may_fail):
                lines.append(f"run {' '.join(argv)}" + (" (may fail)" if may_fail else ""))
            case WaitUntil(argv, pattern, deadline_s):
                lines.append(f"wait up to {deadline_s:.0f} s while {' '.join(argv)} says {pattern}")
            case _:
                assert_never(action)
    return "\n".join(lines)


class RealMachine:
    """The machine that mlxctl runs on."""

    def run(self, argv: tuple[str, ...]) -> tuple[int, str]:
        pipe, both = subprocess.PIPE, subprocess.STDOUT
        done = subprocess.run(argv, stdout=pipe, stderr=both, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
        return done.returncode, done.stdout

    def write(self, path: Path, content: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
        path.chmod(0o644)

    def folder(self, path: Path, user: str) -> None:
        owner = pwd.getpwnam(user)
        private_folder(path, owner.pw_uid, owner.pw_gid)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def link(self, path: Path, target: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(path.name + ".new")
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(target)
        fresh.replace(path)

    def pause(self) -> None:
        time.sleep(POLL_S)


SERVICE_FILE: Final = "service.json"
PACKAGE: Final = "mlxd"
EVERYBODY: Final = -1


class Owner(Struct, frozen=True):
    """Owner of the service that is installed at a prefix. `install` records it for later commands."""

    home: str
    user: str


class Installation:
    """Link and owner of the service at one prefix. This class reads folders and changes nothing."""

    def __init__(self, prefix: Path) -> None:
        self._owner_file = prefix / SERVICE_FILE
        self._link = prefix / "current"

    @property
    def environment(self) -> Path | None:
        return self._link.resolve() if self._link.is_symlink() else None

    @property
    def owner(self) -> Owner | None:
        try:
            return json.decode(self._owner_file.read_bytes(), type=Owner)
        except (OSError, DecodeError):
            return None

    def link(self, env: Path, owner: Owner) -> list[Action]:
        """Return the actions that make the service use this environment."""
        return [
            WriteFile(self._owner_file, json.encode(owner).decode() + "\n"),
            SymbolicLink(self._link, env.resolve()),
        ]

    def unlink(self) -> list[Action]:
        """Return the actions that remove what `link` wrote. The environment stays."""
        return [RemovePath(self._link), RemovePath(self._owner_file)]


def launcher(prefix: Path) -> tuple[str, ...]:
    """Return the command with which a service manager starts the linked environment's own python, by its real path.

    So a running daemon keeps its own modules when another `install` moves the link. If the link is missing, the command
    exits with the status of a bad configuration, after which it is not restarted.
    """
    script = 'home=$(cd -P "$0" && pwd -P) || exit 78; exec "$home/bin/python3" -P -m gateway.main "$@"'
    return ("/bin/sh", "-c", script, str(prefix / "current"))


def version_of(env: Path | None) -> str:
    """Return the version of mlxd in an environment, from its package metadata; empty if there is none."""
    folders = sorted(env.glob(f"lib*/python3*/site-packages/{PACKAGE}-*.dist-info")) if env is not None else []
    return folders[-1].name.removeprefix(f"{PACKAGE}-").removesuffix(".dist-info") if folders else ""


def writers(env: Path) -> set[int]:
    """Return the users other than root who can change the code of an environment; `EVERYBODY` if all users can."""
    program = (env / "bin" / "python3").resolve()
    sites = env.glob("lib*/python3*/site-packages")
    owners: set[int] = set()
    for path in (env, env / "bin", program, *sites):
        real = path.resolve()
        for part in (real, *real.parents):
            try:
                facts = part.stat()
            except FileNotFoundError:
                continue
            owners.add(facts.st_uid)
            if facts.st_mode & stat.S_IWOTH and not facts.st_mode & stat.S_ISVTX:
                owners.add(EVERYBODY)
    return owners - {0}


def check_writers(env: Path, uid: int) -> str:
    """Return a warning if another user can change the code that root runs as `mlxctl`; empty if only root can.

    Raises `CommandFailed` if the service's own user, `uid`, can: that user would be root at the next `sudo mlxctl`.
    """
    others = writers(env)
    if others & {uid, EVERYBODY}:
        who = "every user" if EVERYBODY in others else f"the service's user ({uid})"
        raise CommandFailed(f"{env} can be changed by {who}, and root runs it: install mlxd where only root can write")
    if not others:
        return ""
    users = ", ".join(str(other) for other in sorted(others))
    return f"{env} can be changed by user {users}: who can do that is root at the next sudo mlxctl"
