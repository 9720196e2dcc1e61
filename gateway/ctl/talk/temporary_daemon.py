"""Daemon for as long as a verb needs one, where none runs."""

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

START_S: Final = 60.0
# It drains; its worker's memory comes back before it has ended.
END_S: Final = 120.0
_POLL_S: Final = 0.1


@contextmanager
def a_daemon(tell: Callable[[str], None]) -> Generator[None, None, None]:
    """The daemon that runs, or else one that ends with the block. Raises `CommandFailed` where it cannot start."""
    if offline.daemon() is not None:
        yield
        return
    with tempfile.TemporaryFile() as said:
        _end_with_signals()
        # Ctrl-C is for the conversation: a session of its own does not hear it.
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "gateway.main"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said, start_new_session=True,
        )  # fmt: skip
        try:
            _wait_until_ready(process, said)
            tell("no mlxd runs: one is started, which ends with the conversation (mlxctl serve keeps one)")
            yield
        finally:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _end_with_signals() -> None:
    """Have a closed terminal or a SIGTERM leave the block, which ends the daemon, where they would just kill this."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGHUP, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _leave)


def _leave(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _wait_until_ready(process: "subprocess.Popen[bytes]", said: IO[bytes]) -> None:
    """Raises `CommandFailed` with the daemon's own words where it ends instead."""
    end = time.monotonic() + START_S
    while offline.daemon() is None:
        if process.poll() is not None:
            said.seek(0)
            lines = said.read().decode(errors="replace").strip().splitlines()
            raise CommandFailed(
                lines[-1].removeprefix("mlxd: ") if lines else "mlxd did not start", process.returncode or 1
            )
        if time.monotonic() > end:
            raise CommandFailed(f"mlxd did not start within {START_S:.0f} s")
        time.sleep(_POLL_S)
