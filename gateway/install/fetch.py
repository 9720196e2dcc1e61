"""Commands of pip or uv that install a version of mlxd into its own environment. Nothing here touches the machine."""

from ipaddress import ip_address
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from msgspec import Struct

from gateway.failed import Failed
from gateway.install.description import Run, Scope, Service
from gateway.install.releases import PACKAGE, python

# A CUDA build of MLX is gigabytes.
INSTALL_TIMEOUT_S: Final = 3600.0
# Loads the demo model and generates a token with it.
SMOKE_TIMEOUT_S: Final = 600.0
PYPI: Final = "pypi"
# In a folder of wheels: a requirements file with the hash of each.
LOCK: Final = "requirements.lock"
_SAFE: Final = ("https", "git+https", "git+ssh", "file")
# `mlxctl`, without its script: that has a line that names the folder it was made in.
CTL: Final = "from gateway.ctl import main; main()"


class NoSource(Failed):
    """It was not said where mlxd is to come from."""


class Source(Struct, frozen=True):
    """Source of a version: pip's requirement, and where pip looks for it (a folder, an index' address, or `pypi`).

    `lock` is the folder's file of versions with their hashes, empty without one. `is_built` says that mlxd itself is
    given as source; its dependencies are in no case.
    """

    what: str
    find: str = ""
    lock: str = ""
    is_built: bool = False

    @property
    def version(self) -> str:
        """The version that was asked for; empty when any will do."""
        return "" if " @ " in self.what else self.what.partition("==")[2]


def source(target: str | None, find: str | None, remembered: str, extra: str) -> Source:
    """`target`: a version, a wheel, a checkout, an address, or None for the newest. Raises `NoSource`."""
    if target is not None and (_is_address(target) or Path(target).exists()):
        place = _checked(target) if _is_address(target) else Path(target).absolute().as_uri()
        named = f"{PACKAGE}[{extra}] @ {place}" if extra else f"{PACKAGE} @ {place}"
        return Source(named, _place(find) if find else "", is_built=not urlsplit(place).path.endswith(".whl"))
    if target is not None and ("/" in target or target.endswith(".whl")):
        raise NoSource(f"there is no {target}")
    find = find or remembered
    if not find:
        # The owner of that name on an index would run code as this user, or as root.
        raise NoSource(
            "no source is given: name a wheel or a folder with mlxd, or an index with --from (--from pypi for PyPI)"
        )
    find = _place(find)
    lock = Path(find) / LOCK
    name = f"{PACKAGE}[{extra}]" if extra else PACKAGE
    return Source(f"{name}=={target}" if target else name, find, str(lock) if lock.is_file() else "")


def install(env: Path, wanted: Source, base: Path, uv: str | None) -> list[Run]:
    """Make the environment beside the others, with `base`'s Python, and install into it."""
    own = str(python(env))
    if uv is not None:
        make = (uv, "venv", "--quiet", "--python", str(base), str(env))
        pip = (uv, "pip", "install", "--quiet", "--python", own)
    else:
        make = (str(base), "-m", "venv", str(env))
        pip = (own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input")
    return [Run(make), Run((*pip, *_where(wanted)), timeout_s=INSTALL_TIMEOUT_S)]


def check(env: Path, service: Service) -> list[Run]:
    """The new code starts, reads the configuration that is to be served, and generates with the demo model.

    All of it runs as the service's user: nothing new runs as root before it has served.
    """
    run = (str(python(env)), "-P")
    user = service.user if service.scope is Scope.SYSTEM else ""
    return [
        # Everything that the daemon imports.
        Run((*run, "-m", "gateway.main", "--version"), user=user),
        Run(("/usr/bin/env", f"MLXD_HOME={service.home}", *run, "-c", CTL, "config", "check"), user=user),
        Run((*run, "-m", "worker.smoke"), timeout_s=SMOKE_TIMEOUT_S, user=user),
    ]


def _where(wanted: Source) -> tuple[str, ...]:
    # To build a source distribution is to run its code, as root for the machine's service.
    kinds = ("--only-binary", ":all:", *(("--no-binary", PACKAGE) if wanted.is_built else ()))
    what = ("--require-hashes", "-r", wanted.lock) if wanted.lock else (wanted.what,)
    if not wanted.find or wanted.find == PYPI:
        return (*kinds, *what)
    if _is_address(wanted.find):
        return (*kinds, "--index-url", wanted.find, *what)
    return (*kinds, "--no-index", "--find-links", wanted.find, *what)


def _is_address(text: str) -> bool:
    return "://" in text


def _place(find: str) -> str:
    """Raises `NoSource` for what is neither `pypi`, a folder nor an address that is safe in transit."""
    if find == PYPI:
        return find
    if _is_address(find):
        return _checked(find)
    if not Path(find).is_dir():
        raise NoSource(f"--from {find}: there is no such folder")
    return str(Path(find).absolute())


def _checked(address: str) -> str:
    try:
        parts = urlsplit(address)
        is_safe = parts.scheme in _SAFE or (parts.scheme == "http" and _is_loopback(parts.hostname or ""))
    except ValueError:
        is_safe = False
    if not is_safe:
        raise NoSource(f"{address}: code comes over https, git+https or git+ssh, from this machine, or from a folder")
    return address


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
