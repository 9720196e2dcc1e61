"""`mlxctl launch`: clients are programs in PATH that note how they were started, and ask the daemon a question."""

import json
import os
import shutil
import signal
import stat
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gateway.client_setup.clients import client_of, program_of
from gateway.config.settings import ModelConfig
from gateway.ctl.connect import candidates
from gateway.model_files.metadata import find
from tests.support.ctl import COMMAND, ctl, environment
from tests.support.daemon import DaemonProcess
from tests.support.hub import Hub, model_repo
from tests.support.scale import patient
from tests.support.terminal import Terminal

FAKE = f"""#!{sys.executable}
import json, os, re, sys, urllib.request
from pathlib import Path

words = [*sys.argv[1:], *(value for name, value in os.environ.items() if not name.startswith("HF_"))]
folders = [Path(word) for word in words if "mlxd-launch-" in word]
files = [file for each in folders for file in (each.rglob("*") if each.is_dir() else [each]) if file.is_file()]
text = "\\n".join([*words, *(file.read_text() for file in files)])
url = re.search(r"http://127.0.0.1:[0-9]+", text)[0]
ask = {{"model": "demo", "messages": [{{"role": "user", "content": "What is the capital of France?"}}]}}
headers = {{"content-type": "application/json"}}
request = urllib.request.Request(url + "/v1/chat/completions", json.dumps(ask).encode(), headers)
answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
modes = [file.parent.stat().st_mode & 0o777 for file in files]
note = {{"arguments": sys.argv[1:], "env": dict(os.environ), "answer": answer, "modes": modes, "text": text}}
Path(os.environ["NOTE"]).write_text(json.dumps(note))
sys.exit(7)
"""
MEMORY = 8 << 30


class User:
    """A home with programs, a folder for temporary files, and what the newest client noted."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.programs = home / "bin"
        self.temporary = home / "tmp"
        self.note = home / "note.json"
        for folder in (self.programs, self.temporary):
            folder.mkdir()

    def install(self, program: str, text: str = FAKE) -> None:
        file = self.programs / program
        file.write_text(text)
        file.chmod(file.stat().st_mode | stat.S_IXUSR)

    def noted(self) -> dict[str, Any]:
        return json.loads(self.note.read_bytes())


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> User:
    user = User(tmp_path)
    variables = {"HOME": tmp_path, "TMPDIR": user.temporary, "NOTE": user.note}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("PATH", f"{user.programs}{os.pathsep}{os.defpath}")
    for name in ("CODEX_HOME", "XDG_CONFIG_HOME", "MLXD_KEY"):
        monkeypatch.delenv(name, raising=False)
    return user


@pytest.mark.parametrize("client", ["claude", "codex", "opencode", "continue"])
def test_a_client_reaches_the_model_and_leaves_no_trace(client: str, user: User, demo_daemon: DaemonProcess) -> None:
    user.install(program_of(client))
    before = sorted(user.home.rglob("*"))
    done = ctl(demo_daemon.home, "launch", client, "--model", "demo", "--", "--its-own", "words")

    assert done.returncode == 7, done.stderr
    noted = user.noted()
    assert noted["answer"] == "Paris."
    assert noted["arguments"][-2:] == ["--its-own", "words"]
    assert set(noted["modes"]) <= {0o700}
    assert "demo" in noted["text"]
    assert sorted(user.home.rglob("*")) == sorted([*before, user.note])


def test_variables_that_lead_elsewhere_are_not_passed_on(
    user: User, demo_daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    user.install("claude")
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-ant-mine")
    monkeypatch.setenv("ANTHROPIC_BASE_URL", "https://example.org")
    ctl(demo_daemon.home, "launch", "claude-code", "--model", "demo")

    env = user.noted()["env"]
    assert env["ANTHROPIC_BASE_URL"] == demo_daemon.url
    assert env["ANTHROPIC_MODEL"] == "demo"
    assert "ANTHROPIC_API_KEY" not in env


def test_goose_has_a_session_unless_its_user_wants_something_else(user: User, demo_daemon: DaemonProcess) -> None:
    user.install("goose")
    ctl(demo_daemon.home, "launch", "goose", "--model", "demo")

    assert user.noted()["arguments"] == ["session"]


def test_a_model_that_will_disappoint_is_named_and_used_where_it_is_wanted(
    user: User, demo_daemon: DaemonProcess
) -> None:
    user.install("claude")
    done = ctl(demo_daemon.home, "launch", "claude", "--model", "small")

    assert "small is a small model to try mlxd with" in done.stderr
    assert "small has a context of 256 tokens; the client needs 32768" in done.stderr
    assert done.returncode == 7


def test_a_client_that_is_not_installed_is_told_with_its_command(user: User, run_dir: Path) -> None:
    done = ctl(run_dir, "launch", "opencode")

    assert (done.returncode, done.stdout) == (1, "")
    assert "opencode is not installed, or not in PATH. Install it: npm install -g opencode-ai" in done.stderr


def test_with_keys_nothing_is_started_without_one_for_the_client(user: User, run_dir: Path) -> None:
    user.install("claude")
    assert ctl(run_dir, "keys", "create", "claude").returncode == 0
    done = ctl(run_dir, "launch", "claude", "--model", "demo")

    assert (done.returncode, "put one of this client into MLXD_KEY" in done.stderr) == (1, True)
    assert not user.note.exists()


def test_a_signal_ends_the_client_and_what_it_was_given(user: User, demo_daemon: DaemonProcess) -> None:
    user.install(
        "cn",
        f"#!{sys.executable}\nimport os, pathlib, time\npathlib.Path(os.environ['NOTE']).touch()\ntime.sleep(600)\n",
    )
    command = [*COMMAND, "launch", "continue", "--model", "demo"]
    with subprocess.Popen(command, env=environment(demo_daemon.home), stderr=subprocess.DEVNULL) as verb:
        end = time.monotonic() + patient(20)
        while not user.note.exists():
            assert verb.poll() is None
            assert time.monotonic() < end
            time.sleep(0.02)
        verb.send_signal(signal.SIGTERM)
        assert verb.wait(patient(20)) == 128 + signal.SIGTERM

    assert not list(user.temporary.iterdir())


def made(folder: Path, template: str | None = None) -> str:
    """A model like the demo, which mlxd does not know as its own."""
    shutil.copytree(find("demo"), folder)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return str(folder)


def test_the_default_model_is_the_best_then_the_largest_and_what_cannot_work_comes_last(
    tmp_path: Path,
) -> None:
    path = made(tmp_path / "m")
    mute = made(tmp_path / "mute", "{{ messages }}")
    large = made(tmp_path / "large")
    header = json.dumps({"more": {"dtype": "F16", "shape": [4], "data_offsets": [0, 8]}}).encode()
    Path(large, "model-2.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    models = [
        ModelConfig(name="demo", path="demo", aliases=("default",)),
        ModelConfig(name="absent", path="org/absent"),
        ModelConfig(name="mute", path=mute),
        ModelConfig(name="short", path=path, context=4096),
        ModelConfig(name="plain", path=path),
        ModelConfig(name="large", path=large),
    ]
    found = {each.model.name: each.reasons for each in candidates(models, client_of("claude"), MEMORY)}

    assert list(found)[:2] == ["large", "plain"]
    assert set(list(found)[2:]) == {"mute", "short"}
    assert found["short"] == ("has a context of 4096 tokens; the client needs 32768",)
    assert "cannot call tools" in found["mute"][0]
    wanted = [*models, ModelConfig(name="mine", path=path, aliases=("default",))]
    assert candidates(wanted, client_of("claude"), MEMORY)[0].model.name == "mine"
    # aider calls no tools, and sends less.
    assert not any(each.reasons for each in candidates(models, client_of("aider"), MEMORY)[:3])


def test_without_a_daemon_one_is_started_and_the_models_here_are_looked_at(user: User, run_dir: Path) -> None:
    user.install("claude", FAKE.replace('"demo"', '"coder"'))
    path = made(user.home / "model")
    (run_dir / "mlxd.toml").write_text(f'[server]\nport = 0\n[models.coder]\npath = "{path}"\n')
    done = ctl(run_dir, "launch", "claude")

    assert done.returncode == 7, done.stderr
    assert "claude with coder, 32768 tokens of context" in done.stderr
    assert user.noted()["env"]["ANTHROPIC_MODEL"] == "coder"
    assert ctl(run_dir, "status").returncode == 3


def test_where_only_the_demo_is_three_are_offered_with_their_sizes_and_times(
    user: User, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user.install("claude")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_CACHE", str(user.home / "hub"))
    done = ctl(run_dir, "launch", "claude")

    assert done.returncode == 1
    assert "There is only the demo here" in done.stderr
    offered = [line for line in done.stderr.splitlines() if line.startswith("  ")]
    assert 1 <= len(offered) <= 3
    assert "  1  mlx-community/" in offered[0]
    assert "mlxctl launch claude --model mlx-community/" in done.stderr


def test_on_a_terminal_one_of_them_is_chosen_or_none(
    user: User, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user.install("claude")
    with Hub({"mlx-community/Qwen3-0.6B-4bit": model_repo(find("demo"))}) as hub:
        for name, value in hub.environ(user.home / "hub").items():
            monkeypatch.setenv(name, value)
        # Both end before a model of that size would be loaded; `mlxctl run` has tests of the rest.
        for answer, said in (("", ""), ("2", "'2' is none of them")):
            with Terminal([*COMMAND, "launch", "claude"], environment(run_dir) | {"TERM": "xterm"}) as terminal:
                terminal.wait_for("Download which one?")
                assert "1  mlx-community/Qwen3-0.6B-4bit  20.3 MiB, 1s: very small" in terminal.text
                terminal.type(f"{answer}\n")
                assert terminal.wait() == 1, terminal.text
                assert said in terminal.text
