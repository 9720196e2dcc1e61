"""Facts about this machine for `mlxctl doctor`, gathered here and judged by `gateway.ctl.doctor.checks`."""

import importlib.metadata
import os
import resource
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import httpx2
import psutil

from gateway.command_failed import CommandFailed
from gateway.config.certificate import CertificateUnusable, is_exposed, load
from gateway.config.settings import CONFIG_NAME, Config, ConfigError, ServerConfig, TlsConfig
from gateway.control_types import DaemonStatus
from gateway.ctl import offline
from gateway.ctl.client import deep_health
from gateway.ctl.doctor import checks as doctor
from gateway.ctl.doctor.checks import DoctorFinding
from gateway.media.modalities import expected
from gateway.state_dir import admin_socket, run_dir
from protocol import __version__

DISTRIBUTIONS: Final = ("mlxd", "mlx", "mlx-lm", "pyzmq", "msgspec", "uvicorn")
TIMEOUT_S: Final = 10.0

# Runs a command and returns its output, or None if the command fails.
CommandRunner = Callable[[tuple[str, ...]], str | None]


def examine(home: Path, run_command: CommandRunner) -> Iterator[DoctorFinding]:
    """Yield the findings of all checks."""
    yield doctor.versions({name: version_of_distribution(name) for name in DISTRIBUTIONS})
    config, error = _load(home)
    yield doctor.configuration(home / CONFIG_NAME, error)
    yield from machine(home, run_command)
    if config is not None and config.server.tls.certificate:
        yield tls(config.server.tls)
    yield doctor.vision(version_of_distribution("mlx-vlm"), _with_towers(config) if config else [])
    yield from daemon(config.server if config else ServerConfig())


def machine(home: Path, run_command: CommandRunner, platform: str = sys.platform) -> Iterator[DoctorFinding]:
    """Yield findings about the machine; they need no daemon."""
    facts = _stat(home)
    mode = stat.S_IMODE(facts.st_mode) if facts else None
    yield doctor.home(home, mode, facts.st_uid if facts else -1, os.getuid())
    yield doctor.socket_paths(run_dir(home), admin_socket(home))
    yield doctor.disk(shutil.disk_usage(_nearest(home)).free)
    yield doctor.files(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    if platform == "darwin":
        limit = run_command(("/usr/sbin/sysctl", "-n", "iogpu.wired_limit_mb"))
        yield doctor.wired_limit(limit, psutil.virtual_memory().total)
        yield doctor.sleep(run_command(("/usr/bin/pmset", "-g")))


def daemon(server: ServerConfig) -> Iterator[DoctorFinding]:
    """Yield findings about the daemon: whether it runs and whether it answers."""
    status = offline.daemon()
    # The port may differ from the configuration, through the command line or a later edit of the file.
    number = (urlsplit(status.url).port if status else None) or server.port
    is_taken = status is None and _is_taken(server.host, number)
    yield doctor.port(number, is_taken=is_taken, is_ours=status is not None)
    yield doctor.daemon(status.version if status else None, __version__)
    if status is not None:
        yield doctor.livez(_livez(status.url), status.url)
        yield from media(status)
        yield completion(status)


def media(status: DaemonStatus) -> Iterator[DoctorFinding]:
    """Check the modalities of loaded models, if a model has any or reports that some are missing."""
    models = {each.name: (each.modalities, each.media_reason) for each in status.models}
    if reported := {name: facts for name, facts in models.items() if any(facts)}:
        yield doctor.media(reported)


def _with_towers(config: Config) -> list[str]:
    return [model.name for model in config.models.values() if expected(model.path)]


def tls(config: TlsConfig) -> DoctorFinding:
    """Check the certificate that the configuration names."""
    key = Path(config.key)
    try:
        expires = load(Path(config.certificate), key).expires
    except CertificateUnusable as error:
        return DoctorFinding("certificate", "bad", str(error), "renew it, or correct [server] tls")
    return doctor.certificate(expires, time.time(), str(key) if is_exposed(key) else "")


def run_command(argv: tuple[str, ...]) -> str | None:
    """Run a command and return its output, or None if it fails."""
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def completion(status: DaemonStatus) -> DoctorFinding:
    """Check that each loaded model can generate one token."""
    # No model is loaded for a check: a load may take minutes, and memory that other models need.
    if not any(model.state == "ready" for model in status.models):
        return DoctorFinding("completion", "skip", "no model is loaded", "mlxctl load MODEL")
    try:
        return doctor.completion(deep_health().models)
    except CommandFailed as failed:
        return DoctorFinding("completion", "bad", str(failed), "mlxctl logs")


def version_of_distribution(name: str) -> str | None:
    """Return the version of an installed distribution; None if it is missing."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _load(home: Path) -> tuple[Config | None, str]:
    try:
        return offline.read_config(home=home), ""
    except ConfigError as error:
        return None, str(error)


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


def _nearest(path: Path) -> Path:
    """Return the path, or its nearest ancestor that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _is_taken(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=1):
            return port != 0
    except OSError:
        return False


def _livez(url: str) -> int | None:
    # Any HTTP status shows that the daemon answers. The certificate is not verified, because it may be for another
    # address and the request contains no secret.
    try:
        return httpx2.get(f"{url}/livez", timeout=TIMEOUT_S, trust_env=False, verify=False).status_code
    except httpx2.HTTPError:
        return None
