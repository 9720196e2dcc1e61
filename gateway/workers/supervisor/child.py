"""Child process of this gateway, and its output, which is copied to the log.

Wait for the exit of any process, child or not (pidfd, kqueue, polling).

Start time and memory usage of a process by its pid. The calls for Darwin were not run on a Mac.
"""

import asyncio
import contextlib
import ctypes
import logging
import os
import select
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

from protocol.failures import Failure

POLL_S: Final = 0.05


async def wait_exit(pid: int, is_gone: Callable[[], bool]) -> None:
    """Wait for the exit of process `pid`. The system reports it within milliseconds; where it cannot, `is_gone` is
    polled."""
    fd = _exit_fd(pid)
    if fd is None:
        while not is_gone():  # noqa: ASYNC110 - this system has no exit event
            await asyncio.sleep(POLL_S)
        return
    loop = asyncio.get_running_loop()
    exited = asyncio.Event()
    try:
        # The pid may have been reused before the descriptor was opened.
        if not is_gone():
            loop.add_reader(fd, exited.set)
            await exited.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)


def _exit_fd(pid: int) -> int | None:
    """Open a descriptor that becomes readable when `pid` exits; None if that is impossible."""
    if sys.platform == "linux":
        try:
            return os.pidfd_open(pid)
        except OSError:
            return None
    if sys.platform == "darwin":
        return _kqueue_fd(pid)
    return None


if sys.platform == "darwin":

    def _kqueue_fd(pid: int) -> int | None:
        queue = select.kqueue()
        exit_event = select.kevent(pid, select.KQ_FILTER_PROC, select.KQ_EV_ADD, select.KQ_NOTE_EXIT)
        try:
            queue.control([exit_event], 0)
        except OSError:
            queue.close()
            return None
        # The kqueue object would close its descriptor when it is garbage-collected.
        try:
            return os.dup(queue.fileno())
        finally:
            queue.close()


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


worker_log = logging.getLogger("worker")

KEPT_LINES_MAX: Final = 50
LINE_BYTES_MAX: Final = 8192
READ_BYTES: Final = 65536
REAP_S: Final = 1.0
# A worker's log lines begin with one of these words. Other lines are prints of a library, or stack traces.
_LEVELS: Final = {name: getattr(logging, name) for name in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")}


class Child:
    """Worker process that this gateway started."""

    is_adopted: bool = False

    def __init__(self, popen: subprocess.Popen[bytes], output: "Output", forget: Callable[[], None]) -> None:
        self._popen = popen
        self._output = output
        self._forget = forget

    @property
    def pid(self) -> int:
        return self._popen.pid

    async def wait(self) -> int | None:
        while self._popen.poll() is None:
            await wait_exit(self.pid, lambda: self._popen.poll() is not None)
        return self._popen.returncode

    def signal(self, signum: int) -> None:
        self._popen.send_signal(signum)

    def reap(self) -> None:
        """Wait for the exit, which takes milliseconds for a process that was killed just after its start."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(REAP_S)

    def last_lines(self) -> list[str]:
        self._output.read()
        return list(self._output.lines)

    def failure(self) -> Failure | None:
        return None

    def close(self) -> None:
        self._output.close()
        self._forget()


class Output:
    """Output of a worker, copied to the log line by line. Its last lines are kept for a crash report."""

    def __init__(self, fd: int, label: str) -> None:
        self.lines: deque[str] = deque(maxlen=KEPT_LINES_MAX)
        self._fd = fd
        self._label = label
        self._rest = b""
        self._loop = asyncio.get_running_loop()
        os.set_blocking(fd, False)
        self._loop.add_reader(fd, self.read)

    def read(self) -> None:
        """Read one buffer of pending output and no more, so that a worker with much output cannot block the loop."""
        if self._fd < 0:
            return
        try:
            data = os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(self._fd)
            return
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LINE_BYTES_MAX:
            whole.append(self._rest)
            self._rest = b""
        for line in whole:
            self._keep(line)

    def close(self) -> None:
        if self._fd < 0:
            return
        self._loop.remove_reader(self._fd)
        if self._rest:
            self._keep(self._rest)
        os.close(self._fd)
        self._fd = -1

    def _keep(self, line: bytes) -> None:
        text = line[:LINE_BYTES_MAX].decode(errors="replace").rstrip()
        if not text:
            return
        self.lines.append(text)
        word, _, rest = text.partition(" ")
        level = _LEVELS.get(word)
        if level is None:
            worker_log.info("%s: %s", self._label, text)
        else:
            # The worker has filtered its lines by its own log level, so this process's level is not applied.
            args = (self._label, rest)
            worker_log.handle(worker_log.makeRecord(worker_log.name, level, __file__, 0, "%s: %s", args, None))
