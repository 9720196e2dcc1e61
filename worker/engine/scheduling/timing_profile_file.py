"""File of the timing profile that a worker keeps for its next start.

Description of the machine for timing profiles. The calls for Darwin have never been run on macOS.

Facts of a load, kept for the next start of a model that generates no text.
"""

import logging
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Final

import mlx.core as mx
import psutil
from msgspec import structs

from protocol.model_files import digest, files_digest, weights_digest
from protocol.spec import WorkerSpec
from protocol.timing_profile import (
    FOLDER_ENV,
    FORMAT,
    Calibration,
    LoadFacts,
    TimingProfile,
    UnusableProfile,
    file_of,
    read,
    write,
)
from worker.model import memory
from worker.model.pass_costs import PassCosts

log = logging.getLogger("mlxd.worker")

# Function that runs a command and returns its output; empty if it cannot be run.
Run = Callable[[Sequence[str]], str]

_SYSCTL: Final = ("/usr/sbin/sysctl", "-n")
_IOREG_GPU: Final = ("/usr/sbin/ioreg", "-r", "-d", "1", "-c", "AGXAccelerator")
_CORES: Final = re.compile(r'"gpu-core-count" = (\d+)')
_MODEL: Final = re.compile(r"^model name\s*: (.+)$", re.MULTILINE)


def machine() -> str:
    """Describe this machine in one line: chip, cores, memory, system. Measured times apply to this machine only."""
    if sys.platform == "darwin":
        facts = darwin_facts(_run)
    else:
        facts = linux_facts(_cpu_info(), len(os.sched_getaffinity(0)), platform.release())
    return ", ".join([*device_facts(mx.device_info()), *facts, f"{psutil.virtual_memory().total >> 20} MiB"])


def has_watchdog() -> bool:
    """Whether the system kills a process whose GPU work runs too long in one piece, as Metal does."""
    return mx.metal.is_available()


def device_facts(info: Mapping[str, str | int]) -> list[str]:
    """Return MLX's name of the compute device."""
    return [str(info[key]) for key in ("device_name", "architecture") if info.get(key)]


def darwin_facts(run: Run) -> list[str]:
    """Return the chip, the GPU's cores, and the build of macOS, since an update may change the driver."""
    cores = _CORES.search(run(_IOREG_GPU))
    chip, build = (run((*_SYSCTL, name)).strip() for name in ("machdep.cpu.brand_string", "kern.osversion"))
    return [chip, f"{cores.group(1) if cores else '?'} GPU cores", f"macOS {build}"]


def linux_facts(cpu_info: str, cpus: int, release: str) -> list[str]:
    """Return the processor, the number of CPUs available to this process, and the kernel."""
    model = _MODEL.search(cpu_info)
    return [model.group(1).strip() if model else platform.machine(), f"{cpus} CPUs", f"Linux {release}"]


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _cpu_info() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# The file is written only if at least this many new passes were measured.
MIN_NEW_PASSES: Final = 20
WRITE_INTERVAL_S: Final = 600.0


def open_kept(folder: str, form: str, spec: WorkerSpec) -> "KeptFile":
    """Open the file for the specification's model, for this form of its weights and KV, and for this machine."""
    here = machine()
    key = digest(FORMAT, form, spec.name, here, spec.experts, spec.expert_cache_bytes)
    return KeptFile(Path(folder), key, spec.name, spec.path, here)


class KeptFile:
    """Times of a model under one key, and their file. Owned by the loop's thread.

    If the file is bad, a line is logged and the file's times are lost; nothing else fails.
    """

    def __init__(self, folder: Path, key: str, model: str, path: str, machine: str) -> None:
        self._folder = folder
        self._empty = TimingProfile(format=FORMAT, key=key, model=model, path=path, machine=machine, written=0.0)
        self._due = 0.0
        # Number of measured passes whose times were written to the file.
        self._written = 0
        self._is_writable = True
        self._has_warned = False
        self.kept = self._read()
        self.costs = PassCosts(self.kept.passes if self.kept is not None else ())
        self._load = self.kept.load if self.kept is not None else None

    @property
    def calibration(self) -> Calibration | None:
        return self.kept.calibration if self.kept is not None else None

    def write_load(self, load: LoadFacts) -> None:
        """Write the facts of a load."""
        self._load = load
        before = self._read() or self._empty
        self._write(structs.replace(before, load=load, written=time.time()))

    def flush_if_due(self, now: float) -> None:
        """Write new times, at most once per `WRITE_INTERVAL_S`; `now` is a time of the monotonic clock."""
        if now >= self._due and self._has_news:
            self.save()
            self._due = now + WRITE_INTERVAL_S

    def save(self) -> None:
        """Write new times. A calibration that was written in the meantime stays."""
        if not self._has_news:
            return
        self._written = self.costs.passes
        self._write(
            structs.replace(
                self._read() or self._empty,
                load=self._load,
                passes=tuple(self.costs.records()),
                written=time.time(),
            )
        )

    def write_calibration(self, calibration: Calibration) -> None:
        """Write the results of a calibration, with its times. Raises `OSError`."""
        before = self._read() or self._empty
        write(
            self._folder,
            structs.replace(
                before,
                load=self._load or before.load,
                passes=tuple(self.costs.records()),
                written=time.time(),
                calibration=calibration,
            ),
        )

    @property
    def _has_news(self) -> bool:
        return self.costs.passes - self._written >= MIN_NEW_PASSES

    def _read(self) -> TimingProfile | None:
        file = file_of(self._folder, self._empty.model, self._empty.key)
        try:
            profile = read(file)
            if (profile.key, profile.model) != (self._empty.key, self._empty.model):
                raise UnusableProfile("it is of another model, machine or version")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except UnusableProfile as error:
            if not self._has_warned:
                self._has_warned = True
                log.warning("%s is not used: %s", file, error)
            return None
        return profile

    def _write(self, profile: TimingProfile) -> None:
        if not self._is_writable:
            return
        try:
            write(self._folder, profile)
        except OSError as error:
            self._is_writable = False
            log.warning("measured times are not kept in %s: %s", self._folder, error)


_LIBRARIES: Final = ("mlx", "mlx-lm", "mlxd")


def keep_load(spec: WorkerSpec, path: Path, facts: LoadFacts, libraries: Sequence[str] = ()) -> None:
    """Write the facts of a load of the model in `path`, if a folder for facts is set. Never raises.

    `libraries` names the packages that compute the model in addition to `_LIBRARIES`.
    """
    folder = os.environ.get(FOLDER_ENV, "")
    if not folder:
        return
    try:
        weights, configuration = weights_digest(path), files_digest(path, ("config.json",))
    except (OSError, ValueError) as error:
        log.warning("facts of the load are not kept: %s", error)
        return
    versions = [version(name) for name in (*_LIBRARIES, *libraries)]
    form = digest(spec.kind, spec.dtype, memory.has_gpu(), weights, configuration, *versions)
    open_kept(folder, form, spec).write_load(facts)
