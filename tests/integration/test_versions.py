"""Hand-over between versions of two protocols: a daemon of the version before to this one and back."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from protocol import PROTOCOL
from tests.support import before
from tests.support.daemon import ROOT, DaemonProcess, is_running, write_config
from tests.support.pool import short_home, tokens
from tests.support.scale import patient

BEFORE = "e954cef"
WORKER = ROOT / "tests" / "workers" / "before.py"


@pytest.fixture
def home() -> Iterator[Path]:
    with short_home() as path:
        write_config(path, ["a"])
        yield path


@pytest.fixture
def old_code(tmp_path: Path) -> Path:
    """The packages of the version before, from the history of this repository."""
    archive = subprocess.run(["git", "archive", BEFORE, "gateway", "worker", "protocol"], cwd=ROOT, capture_output=True)
    if archive.returncode:
        pytest.skip(f"no {BEFORE} here: {archive.stderr.decode(errors='replace').strip()}")
    subprocess.run(["tar", "-x", "-C", tmp_path], input=archive.stdout, check=True)
    return tmp_path


def greedy(daemon: DaemonProcess) -> str:
    body = {"model": "a", "prompt": "Hello", "max_tokens": 8, "temperature": 0}
    return daemon.client.post("/v1/completions", json=body).json()["choices"][0]["text"]


def hand_over(daemon: DaemonProcess) -> None:
    daemon.process.send_signal(signal.SIGUSR2)
    assert daemon.wait() == 0


def spec_of(home: Path) -> dict[str, Any]:
    run, cache = home / "run", home / "cache" / "prefix"
    return before.SPEC | {"down": f"ipc://{run}/d.sock", "up": f"ipc://{run}/u.sock", "disk_cache_dir": str(cache)}


def test_a_worker_of_the_version_before_is_replaced_by_one_of_this(home: Path) -> None:
    spec = spec_of(home)
    argv = [sys.executable, str(WORKER), "a", "--spec", json.dumps(spec)]
    with subprocess.Popen(argv, cwd=home, env=os.environ | {"PYTHONPATH": str(ROOT)}, start_new_session=True) as worker:
        try:
            before.write_state(home, spec, psutil.Process(worker.pid), argv)
            with DaemonProcess(home) as daemon:
                assert daemon.complete().json()["choices"][0]["text"] == tokens(5)
                assert worker.wait(patient(10)) == 0
                hand_over(daemon)
            log = (home / "logs" / "mlxd.log").read_text()
            assert f"adopting worker a#1 (pid {worker.pid})" in log
            assert f"it speaks protocol {before.PROTOCOL}, not {PROTOCOL}" in log
        finally:
            worker.kill()


def test_the_version_before_reads_the_number_of_a_worker_of_this_one(home: Path) -> None:
    with DaemonProcess(home) as daemon:
        daemon.complete()
        (pid,) = daemon.worker_pids()
        hand_over(daemon)
        (path,) = (home / "run" / "workers").glob("*.json")
        with before.Gateway(json.loads(path.read_bytes())["spec"]) as gateway:
            gateway.welcome()
            assert gateway.expect(before.HELLO)[1:5] == ["a", 1, pid, PROTOCOL]
            gateway.send(before.SHUTDOWN, "asked")
            gateway.expect(before.GOODBYE)


@pytest.mark.soak
@pytest.mark.parametrize("is_old_first", [True, False], ids=["old-new-old", "new-old-new"])
def test_whole_versions_hand_over_to_each_other_and_replace_the_worker(
    home: Path, old_code: Path, is_old_first: bool
) -> None:
    texts: list[str] = []
    pids: list[int] = []
    with ExitStack() as daemons:
        for code in [old_code, ROOT, old_code] if is_old_first else [ROOT, old_code, ROOT]:
            daemon = daemons.enter_context(DaemonProcess(home, module="gateway.main", code=code))
            texts.append(greedy(daemon))
            pids += daemon.worker_pids()
            hand_over(daemon)
            assert is_running(pids[-1])
    assert texts == [texts[0]] * 3
    assert len(set(pids)) == 3
