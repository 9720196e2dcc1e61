"""Workers of an earlier gateway that have no state file, as after a start while the disk was full."""

import os
import signal
import subprocess
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from gateway.workers import pool
from gateway.workers.supervisor.spawn import default_command
from protocol.spec import WorkerSpec
from tests.support.pool import Running, config, short_home
from tests.support.scale import patient

pytestmark = pytest.mark.anyio


@contextmanager
def orphan(home: Path, epoch: int) -> Generator[subprocess.Popen[bytes]]:
    """A worker process of `home` that waits for its specification. It is in no state file."""
    command = default_command(WorkerSpec("m", "demo", epoch, "", ""))
    with subprocess.Popen(command, stdin=subprocess.PIPE, cwd=home) as process:
        try:
            end = time.monotonic() + patient(10)
            while psutil.Process(process.pid).cmdline() != command:
                assert time.monotonic() < end, "the process got no arguments"
            yield process
        finally:
            process.kill()


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stop a process, and wait until it is stopped: a SIGTERM that comes before would end it."""
    process.send_signal(signal.SIGSTOP)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)


async def test_a_worker_without_a_state_file_is_stopped_and_its_epoch_is_not_used_again() -> None:
    with short_home() as home, orphan(home, epoch=9) as process:
        async with Running(config(home)) as running:
            worker = await running.ready()
            assert process.wait(patient(10)) == -signal.SIGTERM
            assert worker.epoch == 10


async def test_a_worker_of_another_home_is_left_alone() -> None:
    with short_home() as home, short_home() as other, orphan(other, epoch=9) as process:
        async with Running(config(home)) as running:
            assert (await running.ready()).epoch == 1
        assert process.poll() is None


async def test_a_stop_waits_for_the_workers_that_were_not_adopted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "ORPHAN_GRACE_S", 0.2)
    with short_home() as home, orphan(home, epoch=9) as process:
        stop(process)
        async with Running(config(home)):
            pass
        assert process.poll() == -signal.SIGKILL


async def test_a_stop_in_a_hurry_kills_the_workers_that_were_not_adopted() -> None:
    with short_home() as home, orphan(home, epoch=9) as process:
        stop(process)
        async with Running(config(home)) as running:
            await running.pool.stop_now()
            assert process.poll() == -signal.SIGKILL
