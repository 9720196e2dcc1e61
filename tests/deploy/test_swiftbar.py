"""The menu of SwiftBar, of a real daemon and of statuses as a daemon gives them."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.control_types import DaemonStatus
from tests.support.ctl import COMMAND
from tests.support.daemon import DaemonProcess, write_config
from tests.support.scale import patient

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "deploy" / "swiftbar" / "mlxd.10s.py"
# `mlxctl status --json` of a daemon with the demo model ready and another that failed.
RECORDED = Path(__file__).with_name("swiftbar_status.json")


def menu(folder: Path, command: str, *words: str, **env: str) -> list[str]:
    """The lines that the script prints where `mlxctl` is a shell command."""
    mlxctl = folder / "mlxctl"
    mlxctl.write_text(f"#!/bin/sh\n{command}\n")
    mlxctl.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-I", str(SCRIPT), *words],
        env=os.environ | {"MLXCTL": str(mlxctl)} | env,
        capture_output=True, text=True, timeout=patient(30), check=True,
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_the_page_is_opened_with_a_link_that_logs_in(tmp_path: Path) -> None:
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" >{shlex.quote(str(tmp_path / "opened"))}\n')
    browser.chmod(0o755)
    link = "http://127.0.0.1:8484/ui/#code=abc"
    menu(tmp_path, f'[ "$*" = "ui --print" ] && echo {shlex.quote(link)}', "page", BROWSER=f"{browser} %s")

    assert (tmp_path / "opened").read_text().strip() == link


def shown(folder: Path, status: dict[str, Any]) -> list[str]:
    (folder / "status.json").write_text(json.dumps(status))
    return menu(folder, f"cat {shlex.quote(str(folder / 'status.json'))}")


@pytest.fixture
def recorded() -> dict[str, Any]:
    return json.loads(RECORDED.read_text())


def test_the_recorded_status_is_one_of_todays_daemon(recorded: dict[str, Any]) -> None:
    assert msgspec.to_builtins(msgspec.convert(recorded, DaemonStatus)).keys() == recorded.keys()


def test_models_are_shown_with_what_can_be_done_with_them(tmp_path: Path, recorded: dict[str, Any]) -> None:
    lines = shown(tmp_path, recorded)
    title, _, body = "\n".join(lines).partition("\n---\n")

    assert title == "mlxd 1"
    assert f"mlxd {recorded['version']} at {recorded['url']} | href=" in body
    demo = lines.index(next(line for line in lines if line.startswith("demo: ready")))
    assert [line.split(" | ")[0] for line in lines[demo + 1 : demo + 4]] == ["--Unload", "--Restart", "--Pin"]
    assert f'bash="{tmp_path / "mlxctl"}" param1="unload" param2="demo" terminal=false refresh=true' in lines[demo + 1]
    absent = next(at for at, line in enumerate(lines) if line.startswith("absent: "))
    assert "color=red" in lines[absent]
    assert lines[absent + 2].startswith("--Load | ")


def test_a_load_shows_how_far_it_is(tmp_path: Path, recorded: dict[str, Any]) -> None:
    recorded["models"][0] |= {"state": "loading", "loaded_bytes": 30, "total_bytes": 40}
    lines = shown(tmp_path, recorded)

    assert lines[0] == "mlxd 0 …"
    assert any(line.startswith("demo: loading 75 %") for line in lines)


def test_names_and_failures_are_data_and_no_commands_of_a_menu(tmp_path: Path, recorded: dict[str, Any]) -> None:
    recorded["models"][0]["name"] = 'x | bash="/bin/sh" param1="-c'
    recorded["models"][1]["last_failure"] = "boom | bash=/bin/rm\n--more | color=red"
    lines = shown(tmp_path, recorded)

    assert not [line for line in lines if "/bin/rm" in line and " | " in line]
    assert not [line for line in lines if line.startswith("--more")]
    for line in lines:
        text, _, parameters = line.partition(" | ")
        assert "|" not in text + parameters
        if "bash=" in parameters:
            assert shlex.split(parameters)[0] in (f"bash={tmp_path / 'mlxctl'}", f"bash={SCRIPT}")


@pytest.mark.parametrize(
    ("command", "title", "text"),
    [
        ("exit 3", "mlxd –", "mlxd does not run"),
        ("echo 'mlxctl: no | such thing' >&2; exit 1", "mlxd !", "mlxctl: no ¦ such thing | color=red"),
    ],
)
def test_without_a_daemon_the_menu_says_so(tmp_path: Path, command: str, title: str, text: str) -> None:
    lines = menu(tmp_path, command)

    assert lines[:3] == [title, "---", text]


def test_of_a_real_daemon(run_dir: Path) -> None:
    write_config(run_dir, ["a"])
    with DaemonProcess(run_dir) as daemon:
        environment = f"MLXD_HOME={shlex.quote(str(run_dir))} PYTHONPATH={shlex.quote(str(ROOT))}"
        command = f'{environment} exec {shlex.join(COMMAND)} "$@"'
        before = menu(run_dir, command)
        daemon.complete()
        after = menu(run_dir, command)

    assert (before[0], after[0]) == ("mlxd 0", "mlxd 1")
    assert any(line.startswith("--Load | ") for line in before)
    assert any(line.startswith("a: ready") for line in after)
    assert any(f"at {daemon.url} | " in line for line in after)
