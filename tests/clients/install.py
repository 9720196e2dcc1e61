"""Clients from npm and PyPI, installed once into `.cache/clients`, each in a folder of its own.

They are other people's programs: nothing of them comes near `.venv`. What cannot be had is a reason to skip.
"""

import os
import shutil
import subprocess
import sys
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


def npm(folder: str, *packages: str) -> Path:
    """The folder of a package's commands. Skips the test that asks when it cannot be installed."""
    commands = CACHE / folder / "node_modules" / ".bin"
    if not (commands.exists() and _is_made_of(folder, packages)):
        _run(folder, ["npm", "install", "--no-fund", "--no-audit", "--prefix", str(CACHE / folder), *packages])
        _note(folder, packages)
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


def pypi(folder: str, *packages: str) -> Path:
    """The folder of a virtual environment's commands. Skips the test that asks when it cannot be made."""
    commands = CACHE / folder / "bin"
    if not _is_made_of(folder, packages):
        _run(folder, [sys.executable, "-m", "venv", str(CACHE / folder)])
        _run(folder, [str(commands / "pip"), "install", "--quiet", *packages])
        _note(folder, packages)
    return commands


def _is_made_of(folder: str, packages: tuple[str, ...]) -> bool:
    """Whether the folder was completed with just these packages and versions."""
    marker = CACHE / folder / MARKER
    return marker.exists() and marker.read_text() == "\n".join(packages)


def _note(folder: str, packages: tuple[str, ...]) -> None:
    (CACHE / folder / MARKER).write_text("\n".join(packages))


def _run(folder: str, command: list[str]) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{folder}: there is no {Path(command[0]).name} on this machine")
    CACHE.mkdir(parents=True, exist_ok=True)
    env = os.environ | ({"PATH": node_path()} if command[0] == "npm" and folder != "node22" else {})
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, env=env)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        shutil.rmtree(CACHE / folder, ignore_errors=True)
        said = (error.stderr or "").strip().splitlines() if isinstance(error.stderr, str) else []
        pytest.skip(f"{folder} cannot be installed: {said[-1] if said else error}")
