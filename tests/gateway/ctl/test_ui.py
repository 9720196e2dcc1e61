"""`mlxctl ui`, and the link at the start of a daemon, against a daemon process of its own."""

import json
import os
import pty
import re
import select
import stat
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import httpx2
import pytest

from gateway.state_dir import log_path
from tests.support.ctl import ctl, environment
from tests.support.daemon import ROOT, DaemonProcess, write_config
from tests.support.pool import short_home
from tests.support.scale import patient


@pytest.fixture(scope="module")
def daemon() -> Generator[DaemonProcess, None, None]:
    with short_home() as home:
        write_config(home)
        with DaemonProcess(home) as running:
            yield running


def log_in(url: str) -> httpx2.Response:
    """As the page does with the link that it was opened by."""
    base, _, code = url.partition("/ui/#code=")
    return httpx2.post(f"{base}/ui/api/session", json={"code": code}, headers={"origin": base})


def test_the_link_logs_in_once(daemon: DaemonProcess) -> None:
    printed = ctl(daemon.home, "ui", "--print")

    link = printed.stdout.strip()
    assert link.startswith(f"{daemon.url}/ui/#code=")
    assert log_in(link).status_code == 200
    assert log_in(link).status_code == 403


def test_without_a_person_at_a_terminal_the_link_is_printed(daemon: DaemonProcess) -> None:
    assert ctl(daemon.home, "ui").stdout.startswith(daemon.url)
    made = json.loads(ctl(daemon.home, "ui", "--json").stdout)
    assert made["url"].endswith(made["code"])
    assert made["expires_s"] == 60


def test_revoke_ends_every_session(daemon: DaemonProcess) -> None:
    token = log_in(ctl(daemon.home, "ui", "--print").stdout.strip()).json()["token"]
    headers = {"authorization": f"Bearer {token}"}
    assert daemon.client.get("/ui/api/status", headers=headers).status_code == 200

    revoked = ctl(daemon.home, "ui", "--revoke")

    assert re.fullmatch(r"\d+ sessions? of the page ended\n", revoked.stdout)
    assert daemon.client.get("/ui/api/status", headers=headers).status_code == 401
    actions = [json.loads(line)["action"] for line in ctl(daemon.home, "logs", "--audit", "--json").stdout.splitlines()]
    assert {"ui.code", "ui.login", "ui.revoke"} <= set(actions)


def test_a_session_outlives_a_killed_daemon_and_one_that_was_ended_does_not() -> None:
    with short_home() as home:
        write_config(home)
        with DaemonProcess(home) as daemon:
            kept, left, revoked = (session_of(daemon) for _ in range(3))
            assert daemon.client.delete("/ui/api/session", headers=left).status_code == 200
            daemon.kill()
        file = home / "state" / "sessions.json"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        with DaemonProcess(home) as daemon:
            # Also where keys were made meanwhile: it is the owner's.
            assert ctl(home, "keys", "create", "ana").returncode == 0
            answers = [daemon.client.get("/ui/api/me", headers=each) for each in (kept, left)]
            assert [answer.status_code for answer in answers] == [200, 401]
            assert answers[0].json()["may_administer"]
            assert daemon.client.get("/v1/models", headers=kept).status_code == 200
            assert ctl(home, "ui", "--revoke").stdout == "2 sessions of the page ended\n"
            daemon.kill()
        file.write_bytes(file.read_bytes() + b"x")
        with DaemonProcess(home) as daemon:
            # A file that is broken, besides, opens nothing and ends nothing.
            statuses = [daemon.client.get("/ui/api/status", headers=each).status_code for each in (kept, left, revoked)]
            assert statuses == [401] * 3
            assert "sessions of the page is not read" in log_path(home).read_text()
            assert daemon.client.get("/ui/api/status", headers=session_of(daemon)).status_code == 200


def session_of(daemon: DaemonProcess) -> dict[str, str]:
    """Headers of a visitor who has logged in."""
    return {"authorization": f"Bearer {log_in(ctl(daemon.home, 'ui', '--print').stdout.strip()).json()['token']}"}


def test_where_administration_is_off_no_link_is_made() -> None:
    with short_home() as home:
        write_config(home)
        with (home / "mlxd.toml").open("a") as file:
            file.write('[ui]\nadmin = "off"\n')
        with DaemonProcess(home) as daemon:
            refused = ctl(daemon.home, "ui", "--print")

    assert refused.returncode == 1
    assert f"{daemon.url}/ui/" in refused.stderr


def test_on_a_terminal_the_start_ends_with_the_link_and_no_file_has_its_code() -> None:
    with short_home() as home:
        write_config(home)
        master, slave = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.scripted_daemon"],
            cwd=ROOT, env=environment(home), stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
        )  # fmt: skip
        os.close(slave)
        try:
            link = _link(master)
            answer = log_in(link)
            kept = _contents(home)
        finally:
            process.kill()
            process.wait(patient(20))
            os.close(master)

    assert answer.status_code == 200
    assert kept
    assert not [text for text in kept if link.partition("code=")[2] in text]


def _link(terminal: int) -> str:
    text, end = "", time.monotonic() + patient(20)
    while select.select([terminal], [], [], max(0.0, end - time.monotonic()))[0]:
        text += os.read(terminal, 4096).decode(errors="replace")
        if found := re.search(r"(http://\S+/ui/#code=\S+)\r?\n", text):
            return found[1]
    raise AssertionError(f"no link:\n{text}")


def _contents(home: Path) -> list[str]:
    return [file.read_text(errors="replace") for file in home.rglob("*") if file.is_file()]
