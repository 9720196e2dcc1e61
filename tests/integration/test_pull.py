"""From a repository on a hub to an answer, with a daemon that has no model configured and runs all the while."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.ctl import ctl
from tests.support.daemon import DaemonProcess
from tests.support.hub import Hub, model_repo


def test_a_pulled_model_is_served_after_a_reload(
    tmp_path: Path, run_dir: Path, model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (run_dir / "mlxd.toml").write_text("[server]\nport = 0\n")
    with Hub({"org/tiny": model_repo(model_folder("qwen3"))}) as hub:
        for name, value in hub.environ(tmp_path / "hub").items():
            monkeypatch.setenv(name, value)
        with DaemonProcess(run_dir, module="gateway.main") as daemon:
            pulled = ctl(run_dir, "pull", "org/tiny")
            assert pulled.returncode == 0, pulled.stderr
            assert pulled.stdout.endswith("Serve it: mlxctl config reload\n")
            assert ctl(run_dir, "config", "reload").returncode == 0
            again = ctl(run_dir, "pull", "org/tiny")
            said = ctl(run_dir, "chat", "org/tiny", "--max-tokens", "4", "--json", "Hello")
            assert said.returncode == 0, said.stderr
            listed = {model["name"]: model for model in json.loads(ctl(run_dir, "models", "--json").stdout)}
            assert daemon.process.poll() is None

    assert again.stdout.endswith("Load it now: mlxctl load org/tiny\n")
    answer = json.loads(said.stdout)
    assert answer["content"] + answer["reasoning"]
    assert listed["org/tiny"]["state"] == "ready"
    assert listed["org/tiny"]["fits"] is True
