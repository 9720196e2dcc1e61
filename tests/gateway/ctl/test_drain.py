"""`mlxctl drain`: a daemon ends when its requests have."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx2
import pytest

from tests.support.ctl import ctl
from tests.support.daemon import DEADLINE_S, DaemonProcess, write_config
from tests.support.scale import patient


@pytest.fixture
def home(tmp_path: Path) -> Path:
    write_config(tmp_path, server="drain = 10")
    return tmp_path


class Client(threading.Thread):
    """One request, and its answer when it has ended."""

    def __init__(self, daemon: DaemonProcess, tokens: int) -> None:
        super().__init__()
        self._ask = lambda: daemon.complete(max_tokens=tokens)
        self.answer: httpx2.Response | None = None
        self.start()

    def run(self) -> None:
        self.answer = self._ask()


def begun(daemon: DaemonProcess, state: str = "ready") -> None:
    """Until a request of a model in this state is open: one that waits for a load gets no time to end."""
    end = time.monotonic() + patient(DEADLINE_S)
    while not any(
        model["inside"] and model["state"] == state
        for model in json.loads(ctl(daemon.home, "status", "--json").stdout)["models"]
    ):
        assert time.monotonic() < end


# Workers get less time to end than the request takes: what it takes is not theirs.
HASTY = "from gateway.ctl import drain, main; drain.STOP_S = 1.5; main()"


def test_the_running_request_finishes_and_then_the_daemon_ends(home: Path) -> None:
    with DaemonProcess(home, "--step-ms 20") as daemon:
        count = 130
        client = Client(daemon, count)
        begun(daemon)
        command = [sys.executable, "-P", "-c", HASTY, "drain", "--json"]
        environment = os.environ | {"MLXD_HOME": str(home)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=patient(30))
        client.join()

        assert done.returncode == 0, done.stderr
        assert client.answer is not None
        assert client.answer.json()["usage"]["completion_tokens"] == count
        assert json.loads(done.stdout)["cut_off"] == 0
        assert daemon.wait() == 0
        assert "draining for up to 10 s" in daemon.new_log()
        assert ctl(home, "drain").returncode == 3


def test_what_does_not_finish_in_time_is_cut_off_and_told(home: Path) -> None:
    with DaemonProcess(home, "--step-ms 20") as daemon:
        client = Client(daemon, 100_000)
        begun(daemon)
        done = ctl(home, "drain", "--timeout", "1s")
        client.join()

        assert done.returncode == 1, done.stdout
        assert "requests that did not finish: 1" in done.stderr
        assert daemon.wait() == 0


def test_a_request_that_waits_for_its_models_load_is_told_as_cut_off(home: Path) -> None:
    with DaemonProcess(home, "--load-s 60") as daemon:
        client = Client(daemon, 5)
        begun(daemon, "loading")
        done = ctl(home, "drain", "--timeout", "60s")
        client.join()

        assert client.answer is not None
        assert client.answer.status_code == 503
        assert done.returncode == 1, done.stdout
        assert "1 request is running or waiting;" in done.stderr
        assert "requests that did not finish: 1" in done.stderr
        assert daemon.wait() == 0


def test_an_idle_daemon_ends_at_once_whatever_time_it_is_given(home: Path) -> None:
    with DaemonProcess(home) as daemon:
        done = ctl(home, "drain", "--timeout", "60s")

        assert done.returncode == 0, done.stderr
        assert "every request finished" in done.stdout
        assert daemon.wait() == 0
        assert "draining for up to 60 s" in daemon.new_log()


def test_a_time_that_is_none_is_a_bad_command_line(home: Path) -> None:
    assert ctl(home, "drain", "--timeout", "soon").returncode == 2


def test_a_daemon_that_stays_refuses_requests_until_it_is_told_otherwise(home: Path) -> None:
    with DaemonProcess(home) as daemon:
        model = daemon.complete(max_tokens=2).json()["model"]

        done = ctl(home, "drain", "--stay", "--json")

        assert (done.returncode, json.loads(done.stdout)) == (0, {"cut_off": 0})
        assert daemon.complete(max_tokens=2).status_code == 503
        assert httpx2.get(f"{daemon.url}/readyz").status_code == 503
        assert httpx2.get(f"{daemon.url}/readyz", params={"model": model}).status_code == 503

        assert ctl(home, "undrain").stdout == "mlxd takes requests again\n"

        assert daemon.complete(max_tokens=2).status_code == 200
        assert httpx2.get(f"{daemon.url}/readyz", params={"model": model}).json()["status"] == "ready"
        assert httpx2.get(f"{daemon.url}/readyz", params={"model": "nope"}).status_code == 404
        ctl(home, "unload", model)
        idle = httpx2.get(f"{daemon.url}/readyz", params={"model": model})
        assert (idle.status_code, idle.json()["reasons"]) == (503, [f"model {model} is stopped"])
        assert httpx2.get(f"{daemon.url}/readyz").status_code == 200
