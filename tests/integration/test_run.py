"""`mlxctl run`: from a repository on a hub to an answer, in one command, with and without a daemon."""

import json
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from tests.support.ctl import COMMAND, ctl, environment
from tests.support.daemon import DaemonProcess
from tests.support.hub import Hub, model_repo
from tests.support.terminal import Terminal


@pytest.fixture
def hub(
    tmp_path: Path, model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> Generator[Hub, None, None]:
    with Hub({"org/tiny": model_repo(model_folder("qwen3"))}) as running:
        for name, value in running.environ(tmp_path / "hub").items():
            monkeypatch.setenv(name, value)
        yield running


def test_from_nothing_to_an_answer_with_a_daemon_that_ends_with_it(hub: Hub, run_dir: Path) -> None:
    (run_dir / "mlxd.toml").write_text("[server]\nport = 0\n")
    # By the last part of its name.
    done = ctl(run_dir, "run", "Tiny", "Hello", "--max-tokens", "4", "--json")

    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["content"] + answer["reasoning"]
    assert "org/tiny: qwen3, not downloaded" in done.stderr
    assert "fits, with" in done.stderr
    assert "one is started, which ends with the conversation" in done.stderr
    assert ctl(run_dir, "status").returncode == 3


def test_a_daemon_whose_file_names_its_models_is_told_the_new_one(
    hub: Hub, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = run_dir / "mlxd.toml"
    written = '[server]\nport = 0\n\n# mine\n[models.tiny]\npath = "org/absent"  # not yet'
    file.write_text(written)
    with DaemonProcess(run_dir, module="gateway.main") as daemon:
        refused = ctl(run_dir, "run", "org/tiny", "Hello", "--max-tokens", "4")
        assert (refused.returncode, file.read_text()) == (1, written)
        assert "Add tiny-2 to it? Not without --yes." in refused.stderr
        done = ctl(run_dir, "run", "org/tiny", "Hello", "--max-tokens", "4", "--yes")
        # By the last part of its name, and without a hub.
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
        again = ctl(run_dir, "run", "TINY", "Hello", "--max-tokens", "4")
        models = {model["name"]: model for model in json.loads(ctl(run_dir, "status", "--json").stdout)["models"]}
        assert daemon.process.poll() is None

    assert done.returncode == 0, done.stderr
    # Tokens of temperature 0 would be equal; that both answered is enough.
    assert again.returncode == 0, again.stderr
    assert models["tiny-2"]["state"] == "ready"
    assert file.read_text() == f'{written}\n\n[models."tiny-2"]\npath = "org/tiny"\n'
    assert (run_dir / "mlxd.toml.bak").read_text() == written


def test_on_a_terminal_the_load_is_a_bar_and_a_conversation_follows(run_dir: Path) -> None:
    (run_dir / "mlxd.toml").write_text("[server]\nport = 0\n")
    with Terminal(
        [*COMMAND, "run", "demo", "--temperature", "0"], environment(run_dir) | {"TERM": "xterm"}
    ) as terminal:
        terminal.wait_for("> ")
        assert "demo" in terminal.text
        assert "0:00:0" in terminal.text  # the time of the load's bar
        terminal.type("What is the capital of France?\n")
        terminal.wait_for("Paris.")
        terminal.type("/exit\n")
        assert terminal.wait() == 0

    assert ctl(run_dir, "status").returncode == 3


def test_what_is_nowhere_and_what_does_not_load_is_said_in_a_sentence(hub: Hub, run_dir: Path) -> None:
    (run_dir / "mlxd.toml").write_text('[server]\nport = 0\n[memory]\nbudget = "600KiB"\n')
    nowhere = ctl(run_dir, "run", "giant", "Hello")
    too_large = ctl(run_dir, "run", "org/tiny", "Hello")

    assert nowhere.stderr.strip() == "mlxctl: there is no model 'giant' here or on the hub"
    assert too_large.returncode == 1
    assert "does not fit" in too_large.stderr
    assert "not downloaded; --yes downloads it anyway" in too_large.stderr
