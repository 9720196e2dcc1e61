"""Versions side by side: where they are, which one is current, and which can go. Reads folders, changes nothing.

`PREFIX/versions/N` are Python environments, numbered as they come and never changed; `PREFIX/current` and
`PREFIX/previous` are links to two of them, or to the environment that mlxd was first installed into.
"""

import hashlib
import re
import stat
import sys
from collections.abc import Collection
from itertools import pairwise
from pathlib import Path
from typing import Final

from msgspec import DecodeError, Struct, json

from gateway.failed import Failed
from gateway.install.description import Action, Link, Remove, Write

SERVICE_FILE: Final = "service.json"
RELEASE_FILE: Final = "mlxd-release.json"
_OF_WORKERS: Final = ("worker", "protocol")
PACKAGE: Final = "mlxd"
EVERYBODY: Final = -1


class Release(Struct, frozen=True):
    """Written into an environment when all of it is there and was tried. `source`: what it was installed from."""

    version: str
    source: str = ""
    find: str = ""


class Owner(Struct, frozen=True):
    """Owner of the service installed at a prefix, for the verbs that come after `install`."""

    home: str
    user: str


class Releases:
    """Those of one prefix."""

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        # As processes that run from there have it in their arguments.
        self.folder = prefix.resolve() / "versions"
        self.current_link = prefix / "current"
        self.previous_link = prefix / "previous"

    @property
    def current(self) -> Path | None:
        return _target(self.current_link)

    @property
    def previous(self) -> Path | None:
        return _target(self.previous_link)

    @property
    def owner(self) -> Owner | None:
        try:
            return json.decode((self.prefix / SERVICE_FILE).read_bytes(), type=Owner)
        except (OSError, DecodeError):
            return None

    def adopt(self, env: Path, owner: Owner) -> list[Action]:
        """Make the environment that mlxd was installed into the current one."""
        return [
            Write(self.prefix / SERVICE_FILE, json.encode(owner).decode() + "\n"),
            Link(self.current_link, env.resolve()),
        ]

    def forget(self) -> list[Action]:
        """Remove the links of `adopt` and upgrades, but not the environments."""
        return [Remove(self.current_link), Remove(self.previous_link), Remove(self.prefix / SERVICE_FILE)]

    def fresh(self) -> Path:
        """A folder for the next one; no number is used twice while its folder is there."""
        numbers = [int(path.name) for path in self._folders()]
        return self.folder / str(max(numbers, default=0) + 1)

    def complete(self) -> list[Path]:
        """Oldest first."""
        return [path for path in self._folders() if (path / RELEASE_FILE).exists()]

    def stale(self, keep: int, in_use: Collection[Path]) -> list[Path]:
        """Unneeded versions: not linked, not run from, not of the newest `keep`; and what was never completed."""
        kept = {*self.complete()[-keep:], *in_use, self.current, self.previous}
        return [path for path in self._folders() if path not in kept]

    def _folders(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        return sorted(
            (path for path in self.folder.iterdir() if path.name.isdecimal()), key=lambda path: int(path.name)
        )


def python(env: Path) -> Path:
    """Every kind of environment has this name of it."""
    return env / "bin" / "python3"


def launcher(prefix: Path) -> tuple[str, ...]:
    """The program that a service manager starts: the current environment's own python, by its real path.

    By the link itself, a process of one version would find the next one's modules once the link has moved on. Without
    the link it is a bad configuration, which is not started again.
    """
    script = 'home=$(cd -P "$0" && pwd -P) || exit 78; exec "$home/bin/python3" -P -m gateway.main "$@"'
    return ("/bin/sh", "-c", script, str(prefix / "current"))


def version_of(env: Path | None) -> str:
    """As its installer wrote it; empty when there is no mlxd."""
    if env is None:
        return ""
    if (release := read(env)) is not None:
        return release.version
    folders = sorted(env.glob(f"lib*/python3*/site-packages/{PACKAGE}-*.dist-info"))
    return folders[-1].name.removeprefix(f"{PACKAGE}-").removesuffix(".dist-info") if folders else ""


def read(env: Path) -> Release | None:
    try:
        return json.decode((env / RELEASE_FILE).read_bytes(), type=Release)
    except (OSError, DecodeError):
        return None


def fingerprint(env: Path) -> str:
    """Of what a worker runs: equal means that a running one need not be replaced. Empty when that cannot be told."""
    folders = sorted(env.glob("lib/python3*/site-packages/worker"))
    if not folders:
        return ""
    digest = hashlib.sha256()
    site = folders[-1].parent
    for path in sorted(path for package in _OF_WORKERS for path in (site / package).rglob("*.py")):
        # The version's own number is no reason to load a model again.
        lines = (line for line in path.read_bytes().splitlines() if not line.startswith(b"__version__"))
        digest.update(f"{path.relative_to(site)}\0".encode() + b"\n".join(lines))
    # Distributions change by version; ours was looked into.
    others = (path.name for path in site.glob("*.dist-info") if not path.name.startswith(f"{PACKAGE}-"))
    digest.update("\n".join(sorted(others)).encode())
    return digest.hexdigest()


def writers(env: Path) -> set[int]:
    """The users but root who can change what runs from an environment; `EVERYBODY` where every user can."""
    program = python(env).resolve()
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
    """A warning where another user can change what root runs as `mlxctl`; empty when only root can.

    Raises `Failed` where the service's own user, `uid`, can: that user would be root at the next `sudo mlxctl`.
    """
    others = writers(env)
    if others & {uid, EVERYBODY}:
        who = "every user" if EVERYBODY in others else f"the service's user ({uid})"
        raise Failed(f"{env} can be changed by {who}, and root runs it: install mlxd where only root can write")
    if not others:
        return ""
    users = ", ".join(str(other) for other in sorted(others))
    return f"{env} can be changed by user {users}: who can do that is root at the next sudo mlxctl"


def foreign(prefix: Path) -> str:
    """Advice for upgrading an environment that a package manager owns; empty when mlxd may replace it."""
    parts = prefix.resolve().parts
    if ("Cellar", PACKAGE) in pairwise(parts):
        return f"this mlxd belongs to Homebrew: brew upgrade {PACKAGE}, then mlxctl service install"
    if parts[1:3] == ("nix", "store"):
        return "this mlxd belongs to Nix: upgrade it there, then mlxctl service install"
    return ""


def extra(distributions: Collection[str], platform: str = sys.platform) -> str:
    """The MLX backend that an environment has, as mlxd's extra; macOS needs none."""
    if platform == "darwin":
        return ""
    return "cuda" if any(re.match(r"mlx[-_]cuda", name) for name in distributions) else "cpu"


def _target(link: Path) -> Path | None:
    return link.resolve() if link.is_symlink() else None
