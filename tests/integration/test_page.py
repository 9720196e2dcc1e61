"""The page's routes of a daemon process of its own: its chores, its end and its restart."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.ctl import ctl
from tests.support.daemon import DaemonProcess, refuse_journals, write_config
from tests.support.pool import short_home
from tests.support.scale import patient


@pytest.fixture
def home() -> Iterator[Path]:
    with short_home() as folder:
        write_config(folder)
        yield folder


def log_in(daemon: DaemonProcess) -> dict[str, str]:
    """Headers of a session, opened as a person opens it."""
    code = ctl(daemon.home, "ui", "--print").stdout.strip().partition("code=")[2]
    answer = daemon.client.post("/ui/api/session", json={"code": code}, headers={"origin": daemon.url})
    assert answer.status_code == 200, answer.text
    return {"origin": daemon.url, "authorization": f"Bearer {answer.json()['token']}"}


def until(condition: Callable[[], Any]) -> Any:
    end = time.monotonic() + patient(30)
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


def ask_background(daemon: DaemonProcess) -> str:
    """The id of a response that runs, and has said something."""
    body = {"model": "a", "input": "hi", "max_output_tokens": 100_000, "background": True}
    made = daemon.client.post("/v1/responses", json=body).json()
    until(lambda: daemon.client.get(f"/v1/responses/{made['id']}").json()["output"])
    return str(made["id"])


def test_what_the_page_shows_is_what_mlxctl_shows_and_its_orders_are_carried_out(home: Path) -> None:
    with DaemonProcess(home) as daemon:
        session = log_in(daemon)

        def get(path: str) -> Any:
            answer = daemon.client.get(f"/ui/api/{path}", headers=session)
            assert answer.status_code == 200, answer.text
            return answer.json()

        daemon.client.post("/ui/api/models/load", json={"model": "a"}, headers=session)
        until(lambda: get("status")["models"][0]["state"] == "ready")
        shown = json.loads(ctl(home, "status", "--json").stdout)
        assert [model["state"] for model in shown["models"]] == [model["state"] for model in get("status")["models"]]
        assert get("config")["values"] == json.loads(ctl(home, "config", "show", "--json").stdout)
        write_config(home, ("a", "b", "c"))
        checked = daemon.client.post("/ui/api/config/check", json={}, headers=session).json()
        assert checked["changes"]["added"] == ["c"]
        reloaded = daemon.client.post("/ui/api/config/reload", json={}, headers=session).json()
        assert reloaded["done"]["added"] == ["c"]
        # Sampled by the daemon itself, without a viewer.
        until(lambda: len(get("history")["models"].get("a", {}).get("running", ())) >= 2)
        assert any("mlxd serves" in line["message"] for line in get("logs")["lines"])


def test_an_open_feed_ends_with_the_daemon_and_does_not_hold_it_up(home: Path) -> None:
    # A request would be waited for much longer than the test waits for the daemon's end.
    write_config(home, server='drain = "2h"')
    with DaemonProcess(home) as daemon:
        session, told = log_in(daemon), [""]
        is_open = threading.Event()

        def view() -> None:
            with httpx2.stream("GET", f"{daemon.url}/ui/api/feed", headers=session, timeout=patient(30)) as answer:
                for text in answer.iter_text():
                    told[0] += text
                    is_open.set()

        viewer = threading.Thread(target=view)
        viewer.start()
        assert is_open.wait(patient(20))
        daemon.process.terminate()
        assert daemon.wait() == 0
        viewer.join(patient(20))

    assert "event: snapshot" in told[0]
    assert told[0].endswith("event: end\ndata: {}\n\n")


def test_a_background_response_without_a_journal_is_failed_with_its_output_when_its_daemon_is_stopped(
    home: Path,
) -> None:
    write_config(home, server='drain = "100ms"')
    refuse_journals(home)
    with DaemonProcess(home) as daemon:
        response = ask_background(daemon)
        daemon.process.terminate()
        assert daemon.wait() == 0
    with DaemonProcess(home) as daemon:
        found = daemon.client.get(f"/v1/responses/{response}").json()

    assert found["status"] == "failed"
    assert found["output"][0]["content"][0]["text"].startswith("t0 t1 ")


@pytest.mark.soak
def test_a_background_response_without_a_journal_is_told_as_failed_when_its_daemon_was_killed(home: Path) -> None:
    write_config(home)
    refuse_journals(home)
    with DaemonProcess(home) as daemon:
        response = ask_background(daemon)
        daemon.kill()
        with DaemonProcess(home) as successor:
            found = successor.client.get(f"/v1/responses/{response}").json()
            again = {"model": "a", "input": "hi", "previous_response_id": response, "max_output_tokens": 2}
            refused = successor.client.post("/v1/responses", json=again)

    assert (found["status"], found["error"]["code"]) == ("failed", "server_error")
    assert "restarted" in found["error"]["message"]
    assert refused.json()["error"]["code"] == "previous_response_failed"
