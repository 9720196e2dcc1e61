"""Child process of this gateway, and its output, which is copied to the log."""

import asyncio
import contextlib
import logging
import os
import subprocess
from collections import deque
from collections.abc import Callable
from typing import Final

from gateway.workers.supervisor.exit_watch import wait_exit
from protocol.failures import Failure

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
