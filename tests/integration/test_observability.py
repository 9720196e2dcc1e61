"""A real daemon as its operator sees it: where it listens, what it serves, and how to end a request."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.ctl import ctl
from tests.support.daemon import DaemonProcess, write_config
from tests.support.pool import short_home


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    with short_home() as home:
        write_config(home, server="capture = 10")
        with DaemonProcess(home, "--step-ms 5") as process:
            yield process


def listed(home: Path) -> list[dict[str, Any]]:
    return json.loads(ctl(home, "requests", "--json").stdout)["requests"]


def test_the_status_says_which_port_was_taken(daemon: DaemonProcess) -> None:
    assert json.loads(ctl(daemon.home, "status", "--json").stdout)["url"] == daemon.url


def test_a_request_is_shown_cancelled_and_found_again_until_captures_are_cleared(daemon: DaemonProcess) -> None:
    home = daemon.home
    answers: list[httpx2.Response] = []
    body = {"model": "a", "prompt": "hello", "max_tokens": 1_000_000}

    def ask() -> None:
        headers = {"x-request-id": "mine", "authorization": "Bearer sk-secret"}
        answers.append(daemon.client.post("/v1/completions", json=body, headers=headers))

    asking = threading.Thread(target=ask)
    asking.start()
    while not (found := listed(home)):
        assert asking.is_alive()
    assert found[0]["id"] == "mine"
    table = ctl(home, "requests")
    assert "mine" in table.stdout
    assert "/v1/completions" in table.stdout
    shown = ctl(home, "requests", "show", "mine")
    assert shown.returncode == 0
    assert "tokens" in shown.stdout

    done = ctl(home, "cancel", "mine")
    asking.join(20)
    assert (done.returncode, done.stdout) == (0, "mine is cancelled\n")
    assert answers[0].status_code == 499
    gone = ctl(home, "cancel", "mine")
    assert (gone.returncode, gone.stderr) == (1, "mlxctl: There is no request 'mine'.\n")

    kept = ctl(home, "requests", "show", "mine")
    assert '"prompt": "hello"' in kept.stdout
    assert "The operator cancelled this request." in kept.stdout
    assert "sk-secret" not in kept.stdout
    assert "mine 499 /v1/completions" in ctl(home, "requests", "--captured").stdout
    assert ctl(home, "requests", "clear").stdout == "1 captured request deleted\n"
    assert ctl(home, "requests", "show", "mine").returncode == 1
    assert ctl(home, "requests").stdout == "nothing is being served\n"


@pytest.mark.parametrize(
    "words", [["requests"], ["requests", "show", "x"], ["requests", "clear"], ["cancel", "x"], ["batches"]]
)
def test_without_a_daemon_the_exit_status_is_3(tmp_path: Path, words: list[str]) -> None:
    done = ctl(tmp_path, *words)

    assert done.returncode == 3
    assert "mlxd does not run" in done.stderr
