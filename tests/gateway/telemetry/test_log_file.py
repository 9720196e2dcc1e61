import contextlib
import json
import stat
import threading
import time
from collections import deque
from pathlib import Path

import pytest

from gateway.ctl.logs import plain
from gateway.telemetry.logs import RotatingFile, follow, is_about, last_lines, rotated_path
from tests.support.ctl import ctl
from tests.support.daemon import DaemonProcess, write_config


def write(path: Path) -> None:
    path.write_text("first\n")


class Enough(Exception):
    pass


def test_a_full_file_becomes_the_first_of_the_kept_ones(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "mlxd.log"
    file = RotatingFile(path, max_bytes=100, keep=2)
    for number in range(20):
        file.write(f"line {number:02d} {'x' * 30}\n")
    file.close()

    assert sorted(each.name for each in path.parent.iterdir()) == ["mlxd.log", "mlxd.log.1", "mlxd.log.2"]
    assert all(each.stat().st_size <= 100 for each in path.parent.iterdir())
    assert [line[:7] for line in last_lines(path, 100)] == [f"line {number}" for number in range(14, 20)]
    assert [line[:7] for line in last_lines(path, 3)] == ["line 17", "line 18", "line 19"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_smaller_keep_deletes_what_is_over_and_a_restart_appends(tmp_path: Path) -> None:
    path = tmp_path / "mlxd.log"
    path.write_text("before\n")
    for number in (1, 2, 3):
        rotated_path(path, number).write_text("old\n")

    file = RotatingFile(path, max_bytes=100, keep=1)
    file.write("after\n")
    file.close()

    assert path.read_text() == "before\nafter\n"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["mlxd.log", "mlxd.log.1"]


def test_keeping_none_keeps_none(tmp_path: Path) -> None:
    path = tmp_path / "mlxd.log"
    file = RotatingFile(path, max_bytes=20, keep=0)
    for number in range(5):
        file.write(f"line {number} xxxxxxxx\n")
    file.close()

    assert path.read_text() == "line 4 xxxxxxxx\n"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("burst", [1, 3, 7])
def test_following_misses_no_line_through_rotations(tmp_path: Path, burst: int) -> None:
    path = tmp_path / "mlxd.log"
    file = RotatingFile(path, max_bytes=30, keep=8)
    file.write("not new\n")
    left = deque(range(60))
    found: list[str] = []

    def write_more() -> None:
        if not left:
            raise Enough
        for _ in range(min(burst, len(left))):
            file.write(f"line {left.popleft()}\n")

    with contextlib.suppress(Enough):
        for line in follow(path, write_more):
            found.append(line)  # noqa: PERF402  # the iterator ends by raising
    file.close()

    assert found == [f"line {number}" for number in range(60)]


def test_following_a_writer_that_rotates_at_any_moment_misses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "mlxd.log"
    file = RotatingFile(path, max_bytes=4000, keep=500)
    lines = follow(path, lambda: time.sleep(0))
    writer = threading.Thread(target=lambda: [file.write(f"line {number}\n") for number in range(20_000)])
    writer.start()

    found = [next(lines) for _ in range(20_000)]

    writer.join()
    file.close()
    assert found == [f"line {number}" for number in range(20_000)]
    assert rotated_path(path, 10).exists()


def test_following_begins_with_a_file_that_is_not_there_yet(tmp_path: Path) -> None:
    path = tmp_path / "mlxd.log"
    lines = follow(path, lambda: write(path))

    assert next(lines) == "first"


def test_lines_are_for_people_and_cannot_command_the_terminal() -> None:
    line = json.dumps({"time": "T", "level": "info", "logger": "worker", "message": "m#1: \x1b[2Jx", "ms": 3})

    assert plain(line) == "T info    m#1: \\x1b[2Jx ms=3"
    assert plain("Traceback") == "Traceback"


def test_lines_belong_to_a_model_by_field_worker_or_word() -> None:
    assert is_about('{"message": "POST /v1/x", "model": "org/m"}', "org/m")
    assert is_about('{"message": "worker org/m#3: starting -> loading"}', "org/m")
    assert is_about('{"message": "org/m#3: printed by the worker"}', "org/m")
    assert not is_about('{"message": "worker org/m#3: starting -> loading"}', "other")
    assert not is_about('{"message": "worker other-m#3: starting -> loading"}', "m")
    assert not is_about("no json", "org/m")


def test_the_daemon_logs_to_its_file_and_tells_a_pipe_only_how_it_started_and_ended(tmp_path: Path) -> None:
    write_config(tmp_path)
    with DaemonProcess(tmp_path) as daemon:
        assert daemon.complete().status_code == 200
        daemon.process.terminate()
        daemon.wait()
        told = [json.loads(line)["message"] for line in daemon.new_log().splitlines() if line.startswith("{")]

    assert told[0].startswith("mlxd serves 2 models")
    assert told[-1] == "mlxd has stopped"
    assert not [line for line in told if "POST" in line or "->" in line]
    shown = ctl(tmp_path, "logs", "a").stdout
    assert "POST /v1/completions" in shown
    assert "worker a#1: loading -> ready" in shown
    assert "mlxd has stopped" not in shown
    assert "mlxd has stopped" in ctl(tmp_path, "logs", "-n", "3", "--json").stdout


def test_no_log_is_said_with_what_to_look_at(tmp_path: Path) -> None:
    done = ctl(tmp_path, "logs")

    assert done.returncode == 1
    assert "MLXD_HOME" in done.stderr
