"""Messages of `mlxctl` to a new user who mistypes, also after a crash."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from gateway.ctl.logs import plain
from tests.support.ctl import ctl
from tests.support.daemon import DEADLINE_S, DaemonProcess, write_config
from tests.support.scale import patient

ABSENT = """
[models.demo]
[models.moved]
path = "./moved"
[models.later]
path = "org/later"
"""


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> Generator[DaemonProcess, None, None]:
    """A daemon whose model `a` has lost a worker and is served by the next."""
    home = tmp_path_factory.mktemp("h")
    write_config(home, ["a"], server="drain = 10", model="preload = true")
    with DaemonProcess(home, "--step-ms 20") as daemon:
        _until(lambda: daemon.client.get("/readyz").status_code == 200)
        [pid] = daemon.worker_pids()
        os.kill(pid, signal.SIGKILL)
        _until(lambda: daemon.worker_pids() not in ([], [pid]))
        assert daemon.complete().status_code == 200
        yield daemon


def test_an_absent_folder_is_told_by_check_and_is_no_reason_not_to_start(tmp_path: Path) -> None:
    (tmp_path / "mlxd.toml").write_text(ABSENT)

    done = ctl(tmp_path, "config", "check")
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'mlxd.toml'}: good, 3 models\n")
    moved, later = done.stderr.splitlines()
    assert moved == f"not here yet: moved: there is no folder {tmp_path / 'moved'}"
    assert later.startswith("not here yet: later: org/later is neither")
    assert list(json.loads(ctl(tmp_path, "config", "check", "--json").stdout)["absent"]) == ["moved", "later"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("port = 1", "mlxd.toml:1: unknown key 'port'; it belongs in [server]"),
        ("[models.demo]\nmax_loaded = 1", ":2: unknown key 'max_loaded' in [models.demo]; it belongs in [memory]"),
        ("[models.demo]\ntemperature = 1", "'temperature' in [models.demo]; it belongs in [models.NAME.sampling]"),
        ("[memory]\nlog_level = 1", "'log_level' in [memory]; it belongs in [server]"),
        (
            "name = 1",
            "unknown key 'name'; known keys: batches, media, memory, models, server, ui, upstreams",
        ),
    ],
)
def test_a_key_in_the_wrong_table_is_shown_its_own(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "mlxd.toml").write_text(text)

    done = ctl(tmp_path, "config", "check")
    assert (done.returncode, done.stderr.rstrip().endswith(expected)) == (2, True), done.stderr


def test_nobody_is_sent_to_the_hub_for_a_folder(tmp_path: Path) -> None:
    (tmp_path / "mlxd.toml").write_text(ABSENT)

    done = ctl(tmp_path, "info", "moved")
    assert (done.returncode, done.stderr) == (1, f"mlxctl: there is no folder {tmp_path / 'moved'}\n")


@pytest.mark.parametrize(("table", "is_named"), [("", False), ('[models."org/one"]', True)])
def test_a_file_that_never_named_a_removed_model_is_not_said_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str, is_named: bool
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--org--one"
    snapshot = repository / "snapshots" / ("a" * 40)
    for folder in (snapshot, repository / "refs", repository / "blobs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text("a" * 40)
    (snapshot / "config.json").write_text('{"model_type": "llama"}')
    (snapshot / "model.safetensors").write_bytes(b"x")
    (snapshot / "tokenizer.json").write_text("{}")
    (tmp_path / "mlxd.toml").write_text(table)
    assert "org/one" in json.loads(ctl(tmp_path, "config", "check", "--json").stdout)["models"]

    done = ctl(tmp_path, "rm", "org/one", "--yes")
    assert done.returncode == 0
    assert ("still has it as org/one" in done.stderr) is is_named


def test_doctor_looks_at_the_port_that_the_daemon_has_and_not_at_that_of_the_file(tmp_path: Path) -> None:
    write_config(tmp_path, ["demo"])
    path = tmp_path / "mlxd.toml"
    path.write_text(path.read_text().replace("port = 0", "port = 9"))
    with DaemonProcess(tmp_path, "--port", "0", module="gateway.main") as daemon:
        port = urlsplit(daemon.url).port
        found = {finding["name"]: finding for finding in json.loads(ctl(tmp_path, "doctor", "--json").stdout)}

    assert (found["port"]["level"], found["port"]["text"]) == ("ok", f"{port} is mlxd's")


@pytest.mark.parametrize(("package", "imported"), [("gateway.ctl", "gateway.ctl.cli"), ("gateway", "gateway.main")])
def test_ctrl_c_is_no_traceback_while_all_still_begins(package: str, imported: str) -> None:
    code = f"""
import sys
class Interrupt:
    def find_spec(self, name, path, target=None):
        if name == "{imported}":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
from {package} import main
main()
"""
    command = [sys.executable, "-P", "-c", code, "status"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(30))

    assert (done.returncode, done.stderr) == (130, "")


def test_bench_says_why_it_was_refused_and_not_in_json(crashed: DaemonProcess) -> None:
    done = ctl(crashed.home, "bench", "nope")

    assert done.returncode == 1
    assert done.stderr == "mlxctl: HTTP 404: The model 'nope' does not exist. Models here: a.\n"


def test_a_log_without_a_line_about_a_model_says_so(crashed: DaemonProcess) -> None:
    done = ctl(crashed.home, "logs", "nope")

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.endswith("mlxd.log is about a model nope\n")


def test_the_log_of_a_crash_has_no_empty_lines(crashed: DaemonProcess) -> None:
    _until(lambda: "died (SIGKILL" in ctl(crashed.home, "logs", "a").stdout)

    assert "" not in ctl(crashed.home, "logs").stdout.splitlines()


def test_a_field_without_a_value_is_not_shown_in_pythons_words() -> None:
    line = json.dumps({"time": "T", "level": "info", "message": "POST /", "ttft_ms": None, "outcome": "ok"})

    assert plain(line) == "T info    POST / outcome=ok"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/tokenize"])
def test_a_request_without_a_body_is_told_so(crashed: DaemonProcess, path: str) -> None:
    answer = crashed.client.post(path, headers={"content-type": "application/json"})

    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "The request has no body."


# The last: its daemon is gone then.
def test_a_model_that_drains_is_not_blamed_for_the_crash_of_a_predecessor(crashed: DaemonProcess) -> None:
    assert "died (SIGKILL" in json.loads(ctl(crashed.home, "status", "--json").stdout)["models"][0]["last_failure"]
    running = threading.Thread(target=lambda: crashed.complete(max_tokens=150))
    running.start()
    _until(lambda: json.loads(ctl(crashed.home, "status", "--json").stdout)["models"][0]["inside"])
    crashed.process.send_signal(signal.SIGTERM)

    _until(lambda: crashed.client.get("/readyz").status_code == 503)
    assert crashed.client.get("/readyz").json()["reasons"] == ["draining", "model a is draining"]
    assert "died" not in ctl(crashed.home, "status").stdout
    running.join()
    assert crashed.wait() == 0


def _until(is_so: Callable[[], object]) -> None:
    end = time.monotonic() + patient(DEADLINE_S)
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.05)
