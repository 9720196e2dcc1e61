"""Paths of a home: its sockets, keys, logs and state."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

DEFAULT_HOME: Final = "~/.mlxd"


def default_home(environ: Mapping[str, str] = os.environ) -> Path:
    """Return `MLXD_HOME`, or `~/.mlxd`."""
    return Path(environ.get("MLXD_HOME") or DEFAULT_HOME).expanduser().absolute()


def run_dir(home: Path) -> Path:
    """Return the folder of a daemon's sockets and lock."""
    return home / "run"


def admin_socket(home: Path) -> Path:
    """Return the path of the unix socket on which the daemon of a home listens for mlxctl."""
    return run_dir(home) / "admin.sock"


def keys_path(home: Path) -> Path:
    """Return the path of the file with a home's API keys."""
    return home / "keys" / "keys.json"


def usage_path(home: Path) -> Path:
    """Return the path of the file with the usage of a home's API keys."""
    return home / "state" / "usage.json"


def sessions_path(home: Path) -> Path:
    """Return the path of the file with the sessions of a home's page."""
    return home / "state" / "sessions.json"


def connected_path(home: Path, client: str) -> Path:
    """Return the path of the file with what `mlxctl connect` has written for a client, which `--undo` reads."""
    return home / "state" / "clients" / f"{client}.json"


def log_path(home: Path) -> Path:
    """Return the path of a home's log file. Rotated files are next to it."""
    return home / "logs" / "mlxd.log"


def audit_path(home: Path) -> Path:
    """Return the path of a home's audit log. Rotated files are next to it."""
    return home / "logs" / "audit.log"
