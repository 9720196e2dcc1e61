"""Clients from npm and PyPI, installed once into `.cache/clients`, each in a folder of its own.

They are other people's programs: nothing of them comes near `.venv`. What cannot be had is a reason to skip.
"""

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Final

import pytest

CACHE: Final = Path(__file__).parents[2] / ".cache" / "clients"
INSTALL_TIMEOUT_S: Final = 900
# Packages that a folder was made of, one a line.
MARKER: Final = ".installed"
# Claude Code's newest versions want it; where the system's is older, npm has this one too.
NODE: Final = "node@22"
NODE_MAJOR: Final = 22


def npm(folder: str, *packages: str, cache: Path = CACHE) -> Path:
    """The folder of a package's commands. Skips the test that asks when it cannot be installed."""
    place = cache / folder
    commands = place / "node_modules" / ".bin"
    if not (commands.exists() and _is_made_of(place, packages)):
        _run(place, ["npm", "install", "--no-fund", "--no-audit", "--prefix", str(place), *packages])
        _note(place, packages)
    return commands


def node_path() -> str:
    """A PATH whose Node is new enough for every client, where there is npm to get one."""
    path = os.environ.get("PATH", os.defpath)
    if shutil.which("npm") is None:
        return path
    found = subprocess.run(["node", "--version"], capture_output=True, text=True) if shutil.which("node") else None
    if found is not None and int(found.stdout.lstrip("v").partition(".")[0] or 0) >= NODE_MAJOR:
        return path
    return f"{npm('node22', NODE)}{os.pathsep}{path}"


def pypi(folder: str, *packages: str, cache: Path = CACHE) -> Path:
    """The folder of a virtual environment's commands. Skips the test that asks when it cannot be made."""
    place = cache / folder
    commands = place / "bin"
    if not _is_made_of(place, packages):
        _run(place, [sys.executable, "-m", "venv", str(place)])
        _run(place, [str(commands / "pip"), "install", "--quiet", *packages])
        _note(place, packages)
    return commands


def git(folder: str, source: str, commit: str, cache: Path = CACHE) -> Path:
    """A checkout of one commit. Skips the test that asks when it cannot be fetched."""
    place = cache / folder
    if not _is_made_of(place, (commit,)):
        shutil.rmtree(place, ignore_errors=True)
        _run(place, ["git", "clone", "--quiet", "--no-checkout", source, str(place)])
        _run(place, ["git", "-C", str(place), "checkout", "--quiet", commit])
        _note(place, (commit,))
    return place


def sdist(folder: str, package: str, cache: Path = CACHE) -> Path:
    """The files of a source distribution from PyPI. Skips the test that asks when it cannot be downloaded."""
    place = cache / folder
    if not _is_made_of(place, (package,)):
        name = package.partition("==")[0]
        options = ["--quiet", "--no-deps", "--no-binary", name, "--dest", str(place)]
        _run(place, [sys.executable, "-m", "venv", str(place)])
        _run(place, [str(place / "bin" / "pip"), "download", *options, package])
        archive = next(place.glob("*.tar.gz"))
        with tarfile.open(archive) as files:
            files.extractall(place, filter="data")
        archive.unlink()
        _note(place, (package,))
    return next(place.glob(f"{package.partition('==')[0].replace('-', '_')}-*"))


def _is_made_of(place: Path, packages: tuple[str, ...]) -> bool:
    """Whether the folder was completed with just these packages and versions."""
    marker = place / MARKER
    return marker.exists() and marker.read_text() == "\n".join(packages)


def _note(place: Path, packages: tuple[str, ...]) -> None:
    (place / MARKER).write_text("\n".join(packages))


def _run(place: Path, command: list[str]) -> None:
    name = place.name
    if shutil.which(command[0]) is None:
        pytest.skip(f"{name}: there is no {Path(command[0]).name} on this machine")
    place.parent.mkdir(parents=True, exist_ok=True)
    env = os.environ | ({"PATH": node_path()} if command[0] == "npm" and name != "node22" else {})
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, env=env)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        shutil.rmtree(place, ignore_errors=True)
        said = (error.stderr or "").strip().splitlines() if isinstance(error.stderr, str) else []
        pytest.skip(f"{name} cannot be installed: {said[-1] if said else error}")
