"""Facts that the system keeps about a process by its pid. Darwin's calls were not run here."""

import ctypes
import sys
from pathlib import Path
from typing import Final

_RUSAGE_INFO_V2: Final = 2


def start_ticks(pid: int) -> int:
    """The start of a process in ticks since the boot, which no step of the system's clock changes; 0 if unknown."""
    if sys.platform == "darwin":
        return darwin_start_ticks(darwin_rusage(pid))
    return linux_start_ticks(_stat(pid))


def linux_start_ticks(stat: str) -> int:
    """`stat`: of /proc/PID; its field 22. The second field may hold spaces and brackets."""
    fields = stat.rpartition(")")[2].split()
    return int(fields[19]) if len(fields) > 19 else 0


def darwin_start_ticks(rusage: bytes) -> int:
    """`ri_proc_start_abstime`: 8 bytes at offset 80 of rusage_info_v2, by the clock that counts from the boot."""
    return int.from_bytes(rusage[80:88], "little")


def darwin_rusage(pid: int) -> bytes:
    """proc_pid_rusage's rusage_info_v2 (libproc.h); empty when there is no such process."""
    buffer = ctypes.create_string_buffer(512)
    libproc = ctypes.CDLL("/usr/lib/libproc.dylib")
    return buffer.raw if libproc.proc_pid_rusage(pid, _RUSAGE_INFO_V2, buffer) == 0 else b""


def _stat(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except OSError:
        return ""
