"""What pip or uv does to install a version of mlxd into an environment of its own. Nothing here touches the machine."""

from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from msgspec import Struct

from gateway.failed import Failed
from gateway.service.description import Run
from gateway.service.releases import PACKAGE, python

# A CUDA build of MLX is gigabytes.
INSTALL_TIMEOUT_S: Final = 3600.0
# Loads the demo model and generates a token with it.
SMOKE_TIMEOUT_S: Final = 600.0
PYPI: Final = "pypi"
# `mlxctl`, without its script: that has a line that names the folder it was made in.
CTL: Final = "from gateway.ctl import main; main()"


class NoSource(Failed):
    """It was not said where mlxd is to come from."""


class Source(Struct, frozen=True):
    """What to install, in pip's words, and where pip looks for it: a folder, an index' address, or `pypi`."""

    what: str
    find: str = ""


def source(target: str | None, find: str | None, remembered: str, extra: str) -> Source:
    """`target`: a version, a wheel, a checkout, an address, or None for the newest. Raises `NoSource`."""
    if target is not None and (_is_address(target) or Path(target).exists()):
        place = target if _is_address(target) else str(Path(target).absolute())
        named = f"{PACKAGE}[{extra}] @ {place}" if _is_address(target) else f"{place}[{extra}]"
        return Source(named if extra else place, find or "")
    if target is not None and ("/" in target or target.endswith(".whl")):
        raise NoSource(f"there is no {target}")
    find = find or remembered
    if not find:
        # Whoever owns that name on some index would run as this user, or as root.
        raise NoSource("from where? Name a wheel or a folder with mlxd, or an index with --from (--from pypi for PyPI)")
    if find != PYPI and not _is_address(find):
        find = str(Path(find).absolute())
    name = f"{PACKAGE}[{extra}]" if extra else PACKAGE
    return Source(f"{name}=={target}" if target else name, find)


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


def check(env: Path, home: Path) -> list[Run]:
    """The new code starts, reads the configuration that is to be served, and generates with the demo model."""
    run = (str(python(env)), "-P")
    return [
        # Everything that the daemon imports.
        Run((*run, "-m", "gateway.main", "--version")),
        Run(("/usr/bin/env", f"MLXD_HOME={home}", *run, "-c", CTL, "config", "check")),
        Run((*run, "-m", "worker.smoke"), timeout_s=SMOKE_TIMEOUT_S),
    ]


def _where(wanted: Source) -> tuple[str, ...]:
    if not wanted.find or wanted.find == PYPI:
        return (wanted.what,)
    if _is_address(wanted.find):
        return ("--index-url", wanted.find, wanted.what)
    return ("--no-index", "--find-links", wanted.find, wanted.what)


def _is_address(text: str) -> bool:
    return urlsplit(text).scheme in ("http", "https", "file", "git+https", "git+ssh")
