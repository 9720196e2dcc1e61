"""Description of the machine for timing profiles. The calls for Darwin have never been run on macOS."""

import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import mlx.core as mx
import psutil

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
