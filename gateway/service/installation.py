"""Environment of the installed service: the link to it, the service's owner, and the users who can change it.

`PREFIX/current` is a link to the Python environment from which `mlxctl service install` was run.
"""

import stat
from pathlib import Path
from typing import Final

from msgspec import DecodeError, Struct, json

from gateway.failed import CommandFailed
from gateway.service.description import Action, RemovePath, SymbolicLink, WriteFile

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
