"""Checks of a machine, a home and a daemon, with advice for each that fails. Pure functions from facts to findings."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

from msgspec import Struct

from gateway.config.certificate import date
from gateway.control_types import Probe
from gateway.service.description import FILES
from protocol.sockets import PathTooLong, addresses, check_path

DISK_LOW: Final = 10 * 1024**3
DISK_FULL: Final = 1024**3
SLOW_TOKEN_S: Final = 5.0
CERTIFICATE_LOW_S: Final = 14 * 86400.0

Level = Literal["ok", "warn", "bad", "skip"]


class DoctorFinding(Struct, frozen=True):
    """Result of one check. `bad` will not work, `warn` may fail later, and `skip` means that the check could not be
    made.
    """

    name: str
    level: Level
    text: str
    advice: str = ""


def versions(found: Mapping[str, str | None]) -> DoctorFinding:
    """Check the distributions that mlxd needs. `found` maps the name of each to its version, or to None if it is
    missing.
    """
    missing = [name for name, version in found.items() if version is None]
    if missing:
        return DoctorFinding("versions", "bad", f"not installed: {', '.join(missing)}", "install mlxd again")
    return DoctorFinding("versions", "ok", ", ".join(f"{name} {version}" for name, version in found.items()))


def vision(version: str | None, models: Sequence[str]) -> DoctorFinding:
    """Check mlx-vlm. `version` is its version; `models` are the configured models whose files have media towers."""
    if version is not None:
        return DoctorFinding("vision", "ok", f"mlx-vlm {version}, without the dependencies that pip check misses")
    if models:
        text = f"mlx-vlm is not installed: {', '.join(models)} would take images, video or audio, and serve text alone"
        return DoctorFinding("vision", "warn", text, "mlxctl setup vision")
    return DoctorFinding("vision", "ok", "mlx-vlm is not installed, and no model here would use it")


def media(models: Mapping[str, tuple[Sequence[str], str]]) -> DoctorFinding:
    """Check the media of loaded models. `models` maps each name to its modalities and the reason for missing ones."""
    taken_media = [f"{name} takes text{''.join(f', {kind}' for kind in taken)}" for name, (taken, _) in models.items()]
    reasons = [f"{name}: {reason}" for name, (_, reason) in models.items() if reason]
    if reasons:
        return DoctorFinding("media", "warn", "; ".join(taken_media), "; ".join(reasons))
    return DoctorFinding("media", "ok", "; ".join(taken_media))


def configuration(path: Path, error: str) -> DoctorFinding:
    if error:
        return DoctorFinding("configuration", "bad", error, "mlxctl config check tells when it is good")
    return DoctorFinding("configuration", "ok", str(path) if path.exists() else f"no {path}: the defaults")


def home(path: Path, mode: int | None, owner: int, uid: int) -> DoctorFinding:
    """Check the home. `mode` is its permission bits; None if the home is missing."""
    if mode is None:
        return DoctorFinding("home", "ok", f"{path} will be made at the first start")
    # Root may manage homes of other users.
    if uid not in (owner, 0):
        return DoctorFinding(
            "home", "bad", f"{path} belongs to user {owner}, not {uid}", f"chown it, or run as user {owner}"
        )
    if mode & 0o077:
        return DoctorFinding("home", "warn", f"others may enter {path} (mode {mode:04o})", f"chmod 700 {path}")
    return DoctorFinding("home", "ok", f"{path}, mode {mode:04o}")


def socket_paths(run_dir: Path, admin: Path) -> DoctorFinding:
    """Check the length of the paths of the workers' sockets and of the admin socket."""
    try:
        addresses(run_dir)
        check_path(admin)
    except PathTooLong as error:
        return DoctorFinding("sockets", "bad", str(error), "set MLXD_HOME to a shorter folder")
    return DoctorFinding("sockets", "ok", f"paths in {run_dir} are short enough")


def disk(free: int) -> DoctorFinding:
    text = f"{free / 1024**3:.1f} GiB free"
    if free < DISK_FULL:
        return DoctorFinding("disk", "bad", text, "make room: mlxctl cache clear, or smaller caches (cache.disk)")
    if free < DISK_LOW:
        return DoctorFinding("disk", "warn", text, "make room, or set smaller caches (cache.disk)")
    return DoctorFinding("disk", "ok", text)


def port(number: int, *, is_taken: bool, is_ours: bool) -> DoctorFinding:
    if is_ours:
        return DoctorFinding("port", "ok", f"{number} is mlxd's")
    if is_taken:
        advice = f"lsof -i :{number} shows by whom; or set another [server] port"
        return DoctorFinding("port", "bad", f"{number} is taken by another program", advice)
    return DoctorFinding("port", "ok", f"{number} is free")


def certificate(expires: float, now: float, exposed: str) -> DoctorFinding:
    """Check the TLS certificate. `expires` and `now` are Unix times; `exposed` is a private key file that all users can
    read.
    """
    text = f"valid until {date(expires)}"
    if expires - now < CERTIFICATE_LOW_S:
        return DoctorFinding("certificate", "warn", text, "renew it; mlxd takes new files by itself")
    if exposed:
        return DoctorFinding("certificate", "warn", f"every user may read {exposed}", f"chmod 600 {exposed}")
    return DoctorFinding("certificate", "ok", text)


def files(hard: int) -> DoctorFinding:
    """Check the limit of open files. `hard` is the hard limit, up to which mlxd raises its own; negative means no
    limit.
    """
    if 0 <= hard < FILES:
        return DoctorFinding("open files", "warn", f"at most {hard}", f"raise the hard limit to {FILES}: ulimit -Hn")
    return DoctorFinding("open files", "ok", "no limit" if hard < 0 else f"up to {hard}")


def wired_max(ram_bytes: int) -> int:
    """Return the maximum memory that the GPU may wire without leaving the system too little."""
    return max(0, ram_bytes - max(8 * 1024**3, ram_bytes // 16))


def wired_limit(output: str | None, ram_bytes: int) -> DoctorFinding:
    """Check the limit of wired memory. `output` is from `sysctl -n iogpu.wired_limit_mb`; 0 is the system's default."""
    if output is None or not output.strip().isdecimal():
        return DoctorFinding("wired limit", "skip", "sysctl iogpu.wired_limit_mb cannot be read")
    limit = int(output) * 1024**2
    if limit == 0:
        return DoctorFinding("wired limit", "ok", "the system's own share of memory")
    if limit > wired_max(ram_bytes):
        text = f"{limit / 1024**3:.0f} of {ram_bytes / 1024**3:.0f} GiB leaves the system too little"
        return DoctorFinding("wired limit", "warn", text, "lower iogpu.wired_limit_mb: a full machine panics")
    return DoctorFinding(
        "wired limit", "ok", f"{limit / 1024**3:.0f} GiB; lost at each boot unless something sets it again"
    )


def sleep(output: str | None) -> DoctorFinding:
    """Check that the machine never sleeps. `output` is from `pmset -g custom` or `pmset -g`."""
    values = re.findall(r"^\s*sleep\s+(\d+)", output or "", re.MULTILINE)
    if not values:
        return DoctorFinding("sleep", "skip", "pmset cannot be read")
    if any(value != "0" for value in values):
        return DoctorFinding(
            "sleep", "warn", f"the machine sleeps after {max(map(int, values))} min", "sudo pmset -a sleep 0"
        )
    return DoctorFinding("sleep", "ok", "never")


def daemon(version: str | None, ours: str) -> DoctorFinding:
    """Check the running daemon's version. `version` is None if no daemon answers on the admin socket."""
    if version is None:
        return DoctorFinding("daemon", "warn", "does not run", "mlxctl serve, or mlxctl service start")
    if version != ours:
        text = f"{version} runs, and {ours} is installed"
        return DoctorFinding("daemon", "warn", text, "mlxctl service restart")
    return DoctorFinding("daemon", "ok", f"{version} runs")


def livez(status: int | None, url: str) -> DoctorFinding:
    """Check that the daemon answers over HTTP. `status` is None if it cannot be reached."""
    if status == 200:
        return DoctorFinding("livez", "ok", f"{url}/livez answers")
    return DoctorFinding("livez", "bad", f"{url}/livez: {status or 'no answer'}", "mlxctl logs")


def completion(probes: Sequence[Probe]) -> DoctorFinding:
    """Check the probes that generated one token with each loaded model."""
    bad = [probe for probe in probes if not probe.ok]
    if bad:
        text = "; ".join(f"{probe.model}: {probe.error or probe.state}" for probe in bad)
        return DoctorFinding("completion", "bad", text, f"mlxctl logs {bad[0].model}, mlxctl restart {bad[0].model}")
    slow = [probe for probe in probes if probe.ms > SLOW_TOKEN_S * 1000 and probe.state != "busy"]
    if slow:
        text = "; ".join(f"{probe.model} took {probe.ms / 1000:.1f} s for one token" for probe in slow)
        return DoctorFinding("completion", "warn", text, "mlxctl requests shows what it does")
    states = [f"{probe.model} is {probe.state} ({probe.ms:.0f} ms for one token)" for probe in probes]
    return DoctorFinding("completion", "ok", "; ".join(states))
