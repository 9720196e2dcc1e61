"""A daemon that a verb starts if none runs, and that ends with the verb."""

import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import IO, Final

from gateway.ctl.model_verbs import offline
from gateway.failed import CommandFailed

START_TIMEOUT_S: Final = 60.0
# This is long, because the daemon drains first and its workers must release their memory.
END_TIMEOUT_S: Final = 120.0
_POLL_S: Final = 0.1


@contextmanager
def running_daemon(echo: Callable[[str], None]) -> Generator[None, None, None]:
    """Use the running daemon, or start one that ends with the block. Raises `CommandFailed` if it cannot start."""
    if offline.daemon() is not None:
        yield
        return
    with tempfile.TemporaryFile() as output:
        _end_with_signals()
        # The daemon gets its own session, so that Ctrl-C reaches only the conversation.
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "gateway.main"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=output, start_new_session=True,
        )  # fmt: skip
        try:
            _wait_until_ready(process, output)
            echo("no mlxd runs: one is started, which ends with the conversation (mlxctl serve keeps one)")
            yield
        finally:
            process.terminate()
            try:
                process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _end_with_signals() -> None:
    """Let SIGHUP from a closed terminal, or SIGTERM, leave the `with` block and so end the daemon, instead of killing
    this process.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGHUP, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _leave)


def _leave(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _wait_until_ready(process: "subprocess.Popen[bytes]", output: IO[bytes]) -> None:
    """Wait until the daemon is ready. If it exits, raises `CommandFailed` with its last line of output."""
    end = time.monotonic() + START_TIMEOUT_S
    while offline.daemon() is None:
        if process.poll() is not None:
            output.seek(0)
            lines = output.read().decode(errors="replace").strip().splitlines()
            raise CommandFailed(
                lines[-1].removeprefix("mlxd: ") if lines else "mlxd did not start", process.returncode or 1
            )
        if time.monotonic() > end:
            raise CommandFailed(f"mlxd did not start within {START_TIMEOUT_S:.0f} s")
        time.sleep(_POLL_S)
