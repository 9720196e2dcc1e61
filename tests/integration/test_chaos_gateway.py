"""The daemon as a process: killed, drained, refused; and its workers' deaths as a client sees them."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx2
import pytest

from tests.support.daemon import DaemonProcess, is_running, stream_text, write_config
from tests.support.pool import short_home, tokens
from tests.support.scale import patient, scaled

DEADLINE_S = 30


@pytest.fixture
def home() -> Iterator[Path]:
    with short_home() as path:
        write_config(path)
        yield path


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + patient(DEADLINE_S)
    while not condition():
        assert time.monotonic() < end, "the deadline passed"
        time.sleep(0.02)


class Stream(threading.Thread):
    """A streaming client in a thread of its own."""

    def __init__(self, url: str, prompt: str = "hi", model: str = "a", max_tokens: int = 1_000_000) -> None:
        super().__init__(daemon=True)
        self.url, self.model, self.prompt, self.max_tokens = url, model, prompt, max_tokens
        self.lines: list[str] = []
        self.error: Exception | None = None
        self.start()
        wait_until(lambda: len(self.lines) > 2 or not self.is_alive())

    def run(self) -> None:
        body = {"model": self.model, "prompt": self.prompt, "max_tokens": self.max_tokens, "stream": True}
        try:
            with httpx2.stream(
                "POST", f"{self.url}/v1/completions", json=body, timeout=patient(DEADLINE_S)
            ) as response:
                self.lines.extend(line for line in response.iter_lines() if line)
        except httpx2.HTTPError as error:
            self.error = error

    def finish(self) -> list[str]:
        self.join(patient(DEADLINE_S))
        assert not self.is_alive()
        return self.lines


def test_a_killed_gateway_leaves_its_models_loaded_and_the_next_one_adopts_them(home: Path) -> None:
    with DaemonProcess(home) as first:
        assert first.complete().status_code == 200
        (pid,) = first.worker_pids()
        stream = Stream(first.url)
        first.kill()
        stream.join(patient(DEADLINE_S))
        assert is_running(pid)
        with DaemonProcess(home) as second:
            assert second.complete().json()["choices"][0]["text"] == tokens(5)
            assert second.worker_pids() == [pid]
            assert "adopting worker a#1" in second.new_log()
            # What the earlier gateway's client had asked for is stopped, not generated for nobody.
            metrics = second.client.get("/metrics").text
            assert "mlxd_" in metrics
            second.process.send_signal(signal.SIGTERM)
            assert second.wait() == 0
            wait_until(lambda: not is_running(pid))


def test_a_hand_over_finishes_what_runs_and_keeps_the_models_loaded(home: Path) -> None:
    with DaemonProcess(home) as first:
        may_end = home / "may_end"
        stream = Stream(first.url, f"hold {may_end}", max_tokens=100)
        (pid,) = first.worker_pids()
        command = [sys.executable, "-c", "from gateway.ctl import main; main()", "handover"]
        control = subprocess.Popen(command, env=os.environ | {"MLXD_HOME": str(home)})
        wait_until(lambda: "handing over" in first.new_log())
        assert first.complete(model="b").status_code == 503
        may_end.touch()
        assert stream_text(stream.finish()) == tokens(100)
        assert first.wait() == 0
        assert control.wait(patient(DEADLINE_S)) == 0
        with DaemonProcess(home) as second:
            assert second.complete().status_code == 200
            assert second.worker_pids() == [pid]


@pytest.mark.soak
def test_a_hand_over_finishes_what_runs_at_an_upstream(home: Path) -> None:
    may_end = threading.Event()

    class Far(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            self.wfile.write(b'data: {"choices":[{"text":"far"}]}\n\n' * 3)
            may_end.wait(patient(DEADLINE_S))
            self.wfile.write(b'data: {"choices":[{"text":" away"}]}\n\ndata: [DONE]\n\n')

    with ThreadingHTTPServer(("127.0.0.1", 0), Far) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        with (home / "mlxd.toml").open("a") as file:
            file.write(f'[upstreams.cloud]\nurl = "{url}"\nmodels = {{ far = "far" }}\n')
        with DaemonProcess(home) as daemon:
            stream = Stream(daemon.url, model="far")
            daemon.process.send_signal(signal.SIGUSR2)
            wait_until(lambda: "handing over" in daemon.new_log())
            assert daemon.complete().status_code == 503
            may_end.set()
            assert stream_text(stream.finish()) == "farfarfar away"
            assert daemon.wait() == 0
        server.shutdown()


def test_a_hand_over_in_a_hurry_ends_what_runs_and_says_so(home: Path) -> None:
    with DaemonProcess(home) as first:
        stream = Stream(first.url)
        (pid,) = first.worker_pids()
        for _ in range(2):
            first.process.send_signal(signal.SIGUSR2)
            wait_until(lambda: "handing over" in first.new_log())
        assert "error" in stream.finish()[-1]
        assert first.wait() == 0
        assert is_running(pid)


@pytest.mark.soak
def test_a_leftover_that_the_configuration_no_longer_wants_is_replaced(home: Path) -> None:
    with DaemonProcess(home) as first:
        assert first.complete().status_code == 200
        (pid,) = first.worker_pids()
        first.kill()
        write_config(home, model="context = 77")
        with DaemonProcess(home) as second:
            assert second.complete().status_code == 200
            assert not is_running(pid)
            assert len(second.worker_pids()) == 1
            assert '"epoch":2' in next((home / "run" / "workers").glob("*.json")).read_text()


@pytest.mark.parametrize("edit", [lambda spec: spec.pop("path"), *scaled([lambda spec: spec.update(color="blue")], [])])
def test_a_worker_of_another_version_whose_state_is_not_understood_is_stopped_and_loaded_again(
    home: Path, edit: Callable[[dict[str, object]], object]
) -> None:
    with DaemonProcess(home) as first:
        assert first.complete().status_code == 200
        (pid,) = first.worker_pids()
        first.kill()
        (state,) = (home / "run" / "workers").glob("*.json")
        content = json.loads(state.read_bytes())
        edit(content["spec"])
        state.write_text(json.dumps(content))
        with DaemonProcess(home) as second:
            # Nobody has asked for it: it was in memory, and is so again.
            wait_until(lambda: [other for other in second.worker_pids() if other != pid] != [])
            assert not is_running(pid)
            assert second.complete().status_code == 200
            assert f"stopping worker a#1 (pid {pid}): another version of mlxd started it" in second.new_log()


@pytest.mark.soak
def test_an_adopted_worker_that_is_killed_is_noticed_and_replaced(home: Path) -> None:
    with DaemonProcess(home) as first:
        assert first.complete().status_code == 200
        (pid,) = first.worker_pids()
        first.kill()
        with DaemonProcess(home) as second:
            stream = Stream(second.url, max_tokens=200)
            os.kill(pid, signal.SIGKILL)
            assert stream_text(stream.finish()) == tokens(200)
            assert second.complete().status_code == 200
            assert second.worker_pids() != [pid]


def test_sigterm_finishes_what_runs_refuses_what_is_new_and_leaves_nothing(home: Path) -> None:
    write_config(home, server='drain = "10s"')
    with DaemonProcess(home) as daemon:
        stream = Stream(daemon.url, max_tokens=300)
        (pid,) = daemon.worker_pids()
        daemon.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "draining" in daemon.new_log())
        refused = daemon.complete(model="b")
        assert refused.status_code == 503
        assert stream_text(stream.finish()) == tokens(300)
        assert daemon.wait() == 0
        assert not is_running(pid)
        assert not (home / "run" / "admin.sock").exists()


def test_a_drain_past_its_deadline_aborts_and_says_so(home: Path) -> None:
    write_config(home, server='drain = "0.3s"')
    with DaemonProcess(home) as daemon:
        stream = Stream(daemon.url)
        daemon.process.send_signal(signal.SIGTERM)
        assert "error" in stream.finish()[-1]
        assert daemon.wait() == 0


@pytest.mark.soak
def test_a_second_signal_ends_it_at_once(home: Path) -> None:
    write_config(home, server='drain = "600s"')
    with DaemonProcess(home) as daemon:
        Stream(daemon.url)
        (pid,) = daemon.worker_pids()
        daemon.process.send_signal(signal.SIGINT)
        wait_until(lambda: "draining" in daemon.new_log())
        daemon.process.send_signal(signal.SIGINT)
        assert daemon.wait(10.0) == 0
        assert not is_running(pid)


def test_a_worker_that_ignores_signals_does_not_outlive_a_second_one(home: Path) -> None:
    with DaemonProcess(home, "--ignore-sigterm") as daemon:
        assert daemon.complete().status_code == 200
        (pid,) = daemon.worker_pids()
        for said in ("draining", "stopping now"):
            daemon.process.send_signal(signal.SIGTERM)
            wait_until(lambda said=said: said in daemon.new_log())
        assert daemon.wait(10.0) == 0
        assert not is_running(pid)


def test_a_killed_worker_is_a_pause_for_its_streams_and_nothing_for_others(home: Path) -> None:
    with DaemonProcess(home) as daemon:
        doomed, neighbour = Stream(daemon.url, max_tokens=200), Stream(daemon.url, model="b", max_tokens=200)
        status = httpx2.Client(transport=httpx2.HTTPTransport(uds=str(home / "run" / "admin.sock")))
        with status:
            models = {m["name"]: m for m in status.get("http://mlxd/v1/status").json()["models"]}
        os.kill(models["a"]["pid"], signal.SIGKILL)
        lines = doomed.finish()
        assert stream_text(lines) == tokens(200)
        assert lines[-1] == "data: [DONE]"
        assert stream_text(neighbour.finish()) == tokens(200)


@pytest.mark.soak
def test_a_request_whose_workers_die_on_it_is_refused_and_the_server_goes_on(home: Path) -> None:
    with DaemonProcess(home) as daemon:
        answer = daemon.complete("kill", max_tokens=1000)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "quarantined"
        assert daemon.complete().status_code == 200


@pytest.mark.soak
def test_two_cold_requests_share_one_load(home: Path) -> None:
    with DaemonProcess(home, "--load-s 0.3") as daemon:
        first, second = Stream(daemon.url, max_tokens=5), Stream(daemon.url, max_tokens=5)
        assert stream_text(first.finish()) == stream_text(second.finish()) == tokens(5)
        assert '"epoch":1' in next((home / "run" / "workers").glob("*.json")).read_text()


def test_a_second_daemon_in_one_home_is_refused_in_plain_words(home: Path) -> None:
    with DaemonProcess(home) as first:
        second = DaemonProcess(home)
        assert second.wait() == 73
        assert f"another mlxd (pid {first.process.pid}) runs in {home}" in second.new_log()
        assert first.complete().status_code == 200


def test_a_port_in_use_is_refused_in_plain_words(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        daemon = DaemonProcess(home, "--port", str(port), module="gateway.main")
        assert daemon.wait() == 73
        assert f"mlxd: port {port} on 127.0.0.1 is in use" in daemon.new_log()


def test_a_bad_configuration_is_refused_in_plain_words(home: Path) -> None:
    write_config(home, server="drian = 3")
    daemon = DaemonProcess(home, module="gateway.main")
    assert daemon.wait() == 78
    assert "Traceback" not in daemon.new_log()
    assert "drian" in daemon.new_log()
