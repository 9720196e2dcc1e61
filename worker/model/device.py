"""The machine that a model runs on, as far as times depend on it. Darwin's calls were not run here."""

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

# What a command prints; empty where it cannot be run.
Run = Callable[[Sequence[str]], str]

_SYSCTL: Final = ("/usr/sbin/sysctl", "-n")
_GPU: Final = ("/usr/sbin/ioreg", "-r", "-d", "1", "-c", "AGXAccelerator")
_CORES: Final = re.compile(r'"gpu-core-count" = (\d+)')
_MODEL: Final = re.compile(r"^model name\s*: (.+)$", re.MULTILINE)


def machine() -> str:
    """This machine in one line: chip, cores, memory, system. Times of another one say nothing of it."""
    if sys.platform == "darwin":
        facts = darwin_facts(_run)
    else:
        facts = linux_facts(_cpu_info(), len(os.sched_getaffinity(0)), platform.release())
    return ", ".join([*device_facts(mx.device_info()), *facts, f"{psutil.virtual_memory().total >> 20} MiB"])


def has_watchdog() -> bool:
    """Whether the system ends a process whose work on the GPU is too long in one piece: Metal's does."""
    return mx.metal.is_available()


def device_facts(info: Mapping[str, str | int]) -> list[str]:
    """Device that computes, as MLX names it."""
    return [str(info[key]) for key in ("device_name", "architecture") if info.get(key)]


def darwin_facts(run: Run) -> list[str]:
    """Chip, cores of the GPU, and build of macOS: an update of it may bring another driver."""
    cores = _CORES.search(run(_GPU))
    chip, build = (run((*_SYSCTL, name)).strip() for name in ("machdep.cpu.brand_string", "kern.osversion"))
    return [chip, f"{cores.group(1) if cores else '?'} GPU cores", f"macOS {build}"]


def linux_facts(cpu_info: str, cpus: int, release: str) -> list[str]:
    """Processor, how many of them this process may use, and the kernel."""
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
