"""Start time and memory usage of a process by its pid. The calls for Darwin were not run on a Mac."""

import ctypes
import sys
from pathlib import Path
from typing import Final

_RUSAGE_INFO_V2: Final = 2


def start_ticks(pid: int) -> int:
    """Return the start time of a process in ticks since boot, which clock changes do not affect; 0 if unknown."""
    if sys.platform == "darwin":
        return darwin_start_ticks(darwin_rusage(pid))
    return linux_start_ticks(_stat(pid))


def linux_start_ticks(stat: str) -> int:
    """Parse field 22 of /proc/PID/stat. Field 2, the program's name in brackets, may contain spaces and brackets."""
    fields = stat.rpartition(")")[2].split()
    return int(fields[19]) if len(fields) > 19 else 0


def darwin_start_ticks(rusage: bytes) -> int:
    """Parse `ri_proc_start_abstime`, in ticks since boot: 8 bytes at offset 80 of rusage_info_v2."""
    return int.from_bytes(rusage[80:88], "little")


def darwin_rusage(pid: int) -> bytes:
    """Return the `rusage_info_v2` that proc_pid_rusage (libproc.h) fills; empty if there is no such process."""
    buffer = ctypes.create_string_buffer(512)
    libproc = ctypes.CDLL("/usr/lib/libproc.dylib")
    return buffer.raw if libproc.proc_pid_rusage(pid, _RUSAGE_INFO_V2, buffer) == 0 else b""


def _stat(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except OSError:
        return ""
