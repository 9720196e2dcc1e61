"""`mlxctl top`: one look where it can be read, and the live view on a terminal of its own."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from gateway.ctl.tables import bar
from tests.support.ctl import ctl
from tests.support.daemon import DaemonProcess, write_config
from tests.support.scale import patient

DEADLINE_S = 30


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Generator[DaemonProcess, None, None]:
    home = tmp_path_factory.mktemp("h")
    write_config(home)
    with DaemonProcess(home, "--step-ms 20") as running:
        yield running


def test_without_a_terminal_it_is_one_look(daemon: DaemonProcess) -> None:
    body = {"model": "a", "prompt": "hi", "max_tokens": 1_000_000, "stream": True}
    # It runs until both looks are done.
    with daemon.client.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        found = json.loads(ctl(daemon.home, "top", "--json", "--interval", "0.3").stdout)
        shown = ctl(daemon.home, "top", "--once", "--interval", "0.3").stdout

    assert found["budget_bytes"]
    assert [model["name"] for model in found["sample"]["models"]] == ["a"]  # type: ignore[index]
    assert found["requests"][0]["model"] == "a"  # type: ignore[index]
    assert shown.startswith("mlxd ")
    for word in ("memory ", "tokens/s", "OF BUDGET", "REQUEST"):
        assert word in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize("end", ["q", "Ctrl-C"])
def test_on_a_terminal_it_goes_on_until_it_is_ended_and_leaves_the_terminal_as_it_was(
    daemon: DaemonProcess, end: str
) -> None:
    parent, child = pty.openpty()
    command = [sys.executable, "-P", "-c", "from gateway.ctl import main; main()", "top", "--interval", "0.1"]
    environment = os.environ | {"MLXD_HOME": str(daemon.home), "TERM": "xterm", "COLUMNS": "160", "LINES": "40"}
    top = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, env=environment, start_new_session=True)
    os.close(child)
    # Three pictures: the first, and two of the loop.
    shown = _read(parent, lambda text: text.count(b"mlxd 0") >= 3)
    if end == "q":
        os.write(parent, b"q")
    else:
        top.send_signal(signal.SIGINT)
    shown += _read(parent, lambda text: b"\x1b[?1049l" in text)

    assert top.wait(patient(DEADLINE_S)) == 0
    assert b"Traceback" not in shown
    assert b"\x1b[?1049l" in shown  # the other screen is left
    os.close(parent)


def _read(terminal: int, is_enough: Callable[[bytes], bool]) -> bytes:
    text = b""
    end = time.monotonic() + patient(DEADLINE_S)
    while not is_enough(text):
        assert time.monotonic() < end, text
        if select.select([terminal], [], [], 0.2)[0]:
            try:
                text += os.read(terminal, 65536)
            except OSError:  # Linux's word for the end
                break
    return text


def test_without_a_daemon_that_is_said(tmp_path: Path) -> None:
    for words in (["top", "--once"], ["top", "--json"], ["ps"]):
        assert ctl(tmp_path, *words).returncode == 3


def test_a_bar_shows_a_share_and_never_something_as_nothing() -> None:
    assert [bar(part, 100, 4) for part in (0, 1, 50, 100, 300)] == ["░░░░", "█░░░", "██░░", "████", "████"]
    assert bar(5, 0, 4) == "░░░░"
