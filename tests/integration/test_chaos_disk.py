"""A full disk, as the processes see it: no write to any file succeeds. Streams go on, and what is lost is said.

`RLIMIT_FSIZE` 0 makes each write to a file fail at once, and can be taken back.
"""

import json
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from tests.gateway.request.test_in_flight import files as captures
from tests.gateway.telemetry.test_metrics import parsed
from tests.support.daemon import DEADLINE_S, DaemonProcess, is_running, write_config
from tests.support.pool import short_home
from tests.support.scale import patient

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets one process limit another")


@pytest.fixture
def home() -> Iterator[Path]:
    with short_home() as path:
        write_config(path, server="capture = 5")
        yield path


@contextmanager
def full_disk(*pids: int) -> Iterator[None]:
    """No write of these processes to a file succeeds."""
    for pid in pids:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        for pid in pids:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + patient(DEADLINE_S)
    while not condition():
        assert time.monotonic() < end, "the deadline passed"
        time.sleep(0.02)


def log_of(home: Path) -> str:
    return (home / "logs" / "mlxd.log").read_text()


def listed(home: Path) -> int:
    """Number of captured requests that the daemon lists."""
    transport = httpx2.HTTPTransport(uds=str(home / "run" / "admin.sock"))
    with httpx2.Client(transport=transport, base_url="http://mlxd", timeout=patient(DEADLINE_S)) as admin:
        return len(admin.get("/v1/requests?captured=1").json()["captured"])


def metric(daemon: DaemonProcess, name: str) -> float:
    return parsed(daemon.client.get("/metrics").text)[name]


def test_a_log_that_cannot_be_written_loses_lines_and_counts_them_and_no_request(home: Path) -> None:
    with DaemonProcess(home) as daemon:
        assert daemon.complete().status_code == 200
        wait_until(lambda: "/v1/completions" in log_of(home))
        before = len(log_of(home))
        with full_disk(daemon.process.pid):
            assert [daemon.complete().status_code for _ in range(10)] == [200] * 10
            wait_until(lambda: metric(daemon, "mlxd_log_records_dropped_total{}") >= 10)
            assert len(log_of(home)) == before
        assert daemon.complete().status_code == 200
        wait_until(lambda: len(log_of(home)) > before)


def test_a_response_that_cannot_be_kept_is_answered_and_the_next_one_is_kept(home: Path) -> None:
    with DaemonProcess(home) as daemon:

        def respond() -> tuple[int, int]:
            """The statuses of an answer and of coming back to it."""
            answer = daemon.client.post("/v1/responses", json={"model": "a", "input": "hi", "max_output_tokens": 3})
            return answer.status_code, daemon.client.get(f"/v1/responses/{answer.json()['id']}").status_code

        assert respond() == (200, 200)
        with full_disk(daemon.process.pid):
            assert respond() == (200, 404)
        assert respond() == (200, 200)


def test_captures_and_usage_that_cannot_be_written_cost_nothing_else(home: Path) -> None:
    with DaemonProcess(home) as daemon:
        assert daemon.complete().status_code == 200
        # A file has its name before its content, so only the list says that a capture is written.
        wait_until(lambda: listed(home) == 1)
        with full_disk(daemon.process.pid):
            assert [daemon.complete().status_code for _ in range(3)] == [200] * 3
            assert listed(home) == 1, "asked after the writes, and answered after them"
            assert len(captures(home)) == 1
        assert daemon.complete().status_code == 200
        wait_until(lambda: listed(home) == 2)
        resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        daemon.process.terminate()
        assert daemon.wait() == 0


def test_keys_stay_as_they_were_when_they_cannot_be_written(home: Path) -> None:
    def ctl(*words: str, is_full: bool = False) -> subprocess.CompletedProcess[str]:
        code = "import resource, sys; from gateway.ctl import main; "
        if is_full:
            code += "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); "
        command = [sys.executable, "-P", "-c", code + "main()", *words]
        env = {"MLXD_HOME": str(home), "PATH": "/usr/bin:/bin"}
        return subprocess.run(command, capture_output=True, text=True, timeout=patient(30), check=False, env=env)

    assert ctl("keys", "create", "alice").returncode == 0
    keys = (home / "keys" / "keys.json").read_bytes()
    failed = ctl("keys", "create", "bob", is_full=True)

    assert failed.returncode == 1
    assert "keys.json" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert (home / "keys" / "keys.json").read_bytes() == keys
    assert {path.name for path in (home / "keys").iterdir()} <= {"keys.json", "lock"}
    assert ctl("keys", "create", "bob").returncode == 0


def test_a_model_is_started_although_nothing_could_be_written_of_it(home: Path) -> None:
    with DaemonProcess(home) as daemon:
        assert daemon.complete(model="a").status_code == 200
        with full_disk(daemon.process.pid):
            assert daemon.complete(model="b").status_code == 200
        assert daemon.complete(model="b").status_code == 200
        daemon.process.terminate()
        assert daemon.wait() == 0


def test_a_run_folder_that_is_removed_ends_no_stream_and_refuses_what_needs_it(home: Path) -> None:
    with DaemonProcess(home) as daemon:
        assert daemon.complete(model="a").status_code == 200
        workers = daemon.worker_pids()
        shutil.rmtree(home / "run")
        assert [daemon.complete(model="a").status_code for _ in range(3)] == [200] * 3
        cold = daemon.complete(model="b")
        assert cold.status_code == 500
        assert "somebody removed the run folder; restart mlxd" in cold.json()["error"]["message"]
        assert daemon.client.get("/livez").status_code == 200
        daemon.process.terminate()
        assert daemon.wait() == 0
        assert not any(is_running(pid) for pid in workers)


@pytest.mark.soak
def test_a_prefix_cache_that_cannot_be_written_costs_no_answer(home: Path) -> None:
    write_config(home, ["a"])
    with DaemonProcess(home, module="gateway.main") as daemon:

        def chat(text: str) -> httpx2.Response:
            messages = [{"role": "user", "content": text}]
            body = {"model": "a", "messages": messages, "max_tokens": 8, "temperature": 0}
            return daemon.client.post("/v1/chat/completions", json=body)

        long = "How much is 2 plus 3? " * 20
        said = chat(long).json()["choices"]
        with full_disk(*daemon.worker_pids()):
            for number in range(3):
                assert chat(f"{number} {long}").status_code == 200
            assert chat(long).json()["choices"] == said
        assert json.loads(chat(long).text)["choices"] == said
