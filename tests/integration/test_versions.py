"""Hand-over between versions: a daemon of the version before to this one and back, each with the other's workers."""

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


def test_a_worker_of_the_version_before_is_adopted_and_left_as_it_was(home: Path) -> None:
    spec = spec_of(home)
    argv = [sys.executable, str(WORKER), "a", "--spec", json.dumps(spec)]
    with subprocess.Popen(argv, cwd=home, env=os.environ | {"PYTHONPATH": str(ROOT)}, start_new_session=True) as worker:
        try:
            state = before.write_state(home, spec, psutil.Process(worker.pid), argv)
            recorded = state.read_bytes()
            with DaemonProcess(home) as daemon:
                assert daemon.complete().json()["choices"][0]["text"] == tokens(5)
                decoded = daemon.client.post("/detokenize", json={"model": "a", "tokens": [1, 2]})
                assert decoded.json()["prompt"] == "t1 t2 "
                assert f"adopting worker a#1 (pid {worker.pid})" in daemon.new_log()
                hand_over(daemon)

                assert worker.poll() is None
                assert state.read_bytes() == recorded
                assert before.read_state(state)["pid"] == worker.pid
                with before.Gateway(spec) as gateway:
                    gateway.welcome()
                    assert gateway.expect(before.HELLO)[1:4] == ["a", 1, worker.pid]
                    gateway.send(before.SHUTDOWN, "asked")
                    assert worker.wait(patient(10)) == 0
        finally:
            worker.kill()


def test_the_version_before_takes_over_a_worker_of_this_one(home: Path) -> None:
    with DaemonProcess(home, module="gateway.main") as daemon:
        text = greedy(daemon)
        (pid,) = daemon.worker_pids()
        hand_over(daemon)

        (path,) = (home / "run" / "workers").glob("*.json")
        state = before.read_state(path)
        assert state["pid"] == pid
        with before.Gateway(state["spec"]) as gateway:
            gateway.welcome()
            assert gateway.expect(before.HELLO)[1:5] == ["a", 1, pid, 1]
            gateway.expect(before.READY)
            gateway.send(before.PING, 7, 1)
            assert gateway.expect(before.PONG, lambda pong: pong[1] == 7)[2] == 1
            assert complete(gateway, "Hello", 8) == text
            gateway.send(before.SHUTDOWN, "asked")
            gateway.expect(before.GOODBYE)


def complete(gateway: before.Gateway, prompt: str, tokens: int) -> str:
    """The text of a greedy completion, as the version before asked for it."""
    sampling = [0.0, 1.0, 0, 0.0, 1.0, 0.0, 0.0, {}, 0, False]
    options = [tokens, [], None, False, 0, 0, False, "", "", [], None, None]
    gateway.send(before.GENERATE, 1 << 40, [before.TEXT_PROMPT, prompt], sampling, *options)
    text = ""
    while True:
        for rid, _kind, piece, _ids, _tool, _logprobs, finish, *_ in gateway.expect(before.STEP)[3]:
            assert rid == 1 << 40
            text += piece
            if finish is not None:
                assert finish == before.LENGTH
                return text


@pytest.mark.soak
@pytest.mark.parametrize("is_old_first", [True, False], ids=["old-new-old", "new-old-new"])
def test_whole_versions_hand_over_to_each_other_and_keep_the_model_loaded(
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
    assert pids == [pids[0]] * 3
