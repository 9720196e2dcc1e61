"""A daemon beside a person: its workers are told their pace, the metric tells it, and a reload changes it at once."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.workers.power import CHUNK_TOKENS, DUTY_CYCLE, TICK_MS
from tests.support.daemon import DaemonProcess, write_config
from tests.support.scale import patient


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + patient(20)
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def log_of(daemon: DaemonProcess) -> str:
    return (daemon.home / "logs" / "mlxd.log").read_text()


@pytest.fixture
def daemon(tmp_path: Path) -> DaemonProcess:
    write_config(tmp_path, ["a"], server="desktop = true")
    return DaemonProcess(tmp_path)


def test_workers_leave_a_display_its_part_for_as_long_as_the_configuration_says(daemon: DaemonProcess) -> None:
    with daemon:
        duty = f"mlxd_gpu_duty_ratio {DUTY_CYCLE}"
        assert daemon.complete().status_code == 200
        until(lambda: duty in daemon.client.get("/metrics").text)
        told = f"told SetPace(duty_cycle={DUTY_CYCLE}, tick_ms={TICK_MS}, chunk={CHUNK_TOKENS}, may_keep_warm=True)"
        until(lambda: told in log_of(daemon))

        write_config(daemon.home, ["a"], server="desktop = false")
        daemon.process.send_signal(signal.SIGHUP)
        until(lambda: "mlxd_gpu_duty_ratio 1.0" in daemon.client.get("/metrics").text)
        until(lambda: "told SetPace(duty_cycle=1.0, tick_ms=0, chunk=0, may_keep_warm=True)" in log_of(daemon))
        assert daemon.complete().status_code == 200
