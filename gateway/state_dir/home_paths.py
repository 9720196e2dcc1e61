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
    """Return the unix socket on which a home's daemon listens for mlxctl."""
    return run_dir(home) / "admin.sock"


def keys_path(home: Path) -> Path:
    """Return the file of a home's API keys."""
    return home / "keys" / "keys.json"


def usage_path(home: Path) -> Path:
    """Return the file of the usage of a home's API keys."""
    return home / "state" / "usage.json"


def log_path(home: Path) -> Path:
    """Return the log file of a home, next to older ones."""
    return home / "logs" / "mlxd.log"


def audit_path(home: Path) -> Path:
    """Return the audit log of a home, next to older ones."""
    return home / "logs" / "audit.log"
