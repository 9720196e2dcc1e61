"""What verbs share that work without the daemon."""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from gateway.config import Config
    from gateway.schemas.admin import ModelStatus, Status


def read_config() -> "Config":
    """The configuration of the home, as the daemon would read it now. Raises `Failed`."""
    from gateway.config import ConfigError, default_home
    from gateway.configread import load_config
    from gateway.ctl.client import Failed

    try:
        return load_config(default_home())
    except ConfigError as error:
        raise Failed(str(error)) from None


def daemon() -> "Status | None":
    """What it says of itself; None when it does not run."""
    from gateway.ctl.client import Failed, get
    from gateway.schemas.admin import Status

    try:
        return get("/v1/status", Status)
    except Failed:
        return None


def running_models() -> "list[ModelStatus] | None":
    """What the daemon serves; None when it does not run."""
    status = daemon()
    return None if status is None else status.models


def readable_config() -> "Config | None":
    """The same as `read_config`, where a broken file is no reason to say nothing."""
    from gateway.ctl.client import Failed

    try:
        return read_config()
    except Failed:
        return None


def is_running(pid: int) -> bool:
    """One that has ended, and that nobody has asked about yet, does not run."""
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def budget_bytes(status: "Status | None") -> int:
    """What all models may take together: the daemon's word, or what it would be."""
    from gateway.pool.machine import ThisMachine

    if status is not None and status.memory is not None:
        return status.memory.budget_bytes
    config = readable_config()
    budget = "auto" if config is None else config.memory.budget_bytes
    return ThisMachine().budget() if budget == "auto" else budget


def available_bytes() -> int:
    """What a model could take if those of the daemon made room for it."""
    from gateway.pool.machine import ThisMachine

    status = daemon()
    held = status.memory.footprint_bytes if status is not None and status.memory is not None else 0
    return min(budget_bytes(status), ThisMachine().available() + held)


def console() -> "Console":
    """For tables: a pipe has no width, so nothing is cut off there."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=240)
