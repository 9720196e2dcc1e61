"""That no verb is missing, and what each of them has."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gateway.ctl.test_help import HELPS, commands, root
from tests.support.ctl import ctl
from tests.support.scale import patient, scaled

VERBS = [
    "serve", "status", "top", "models", "ps", "load", "unload", "restart", "pin", "unpin", "pull", "rm", "info", "chat",
    "requests", "cancel", "logs", "cache", "keys", "config", "drain", "doctor", "verify", "bench", "parse", "service",
    "ui", "version", "help", "calibrate", "adapter", "why", "launch", "connect", "selftest",
]  # fmt: skip
NESTED = [
    "cache stats", "cache clear", "config check", "config show", "config reload", "config schema", "keys create",
    "keys list", "keys revoke", "keys rotate", "keys usage", "requests show", "service install", "service uninstall",
    "service start", "service stop", "service restart", "service status", "service logs",
    "adapter load", "adapter unload",
]  # fmt: skip
# Why a verb has no --json.
WITHOUT_JSON = {
    "serve": "it is the daemon, whose log is JSON",
    "parse": "what it prints is JSON",
    "help": "its text is for people",
    "launch": "what is printed is its client's",
    "config schema": "what it prints is JSON",
    "setup vision": "what it prints is that of pip",
    "setup audio": "what it prints is that of pip",
}
COMMANDS = {verb: command for verb, command in commands(root()) if not command.hidden}


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_exists_and_is_shown(verb: str) -> None:
    command = root().commands[verb]

    assert not command.hidden
    assert any(text == verb or text.startswith(f"{verb} ") for text in HELPS)


def test_each_verb_has_a_row_on_the_page_about_mlxctl() -> None:
    page = (Path(__file__).parents[3] / "docs" / "cli.md").read_text()
    rows = "\n".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))

    assert [verb for verb in {*VERBS, *NESTED, *COMMANDS} if not re.search(rf"`{verb}\b", rows)] == []


@pytest.mark.parametrize("verb", NESTED)
def test_a_verb_of_a_group_exists_and_is_shown(verb: str) -> None:
    assert verb in COMMANDS


@pytest.mark.parametrize("verb", sorted(set(COMMANDS) - set(WITHOUT_JSON)))
def test_what_a_verb_says_can_be_had_as_json(verb: str) -> None:
    options = [option for parameter in COMMANDS[verb].params for option in parameter.opts]

    assert "--json" in options


def complete(home: Path, *words: str) -> list[str]:
    """Completions that bash offers for the last of `words`."""
    environment = os.environ | {
        "MLXD_HOME": str(home), "HF_HUB_CACHE": str(home / "hub"), "_MLXCTL_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(("mlxctl", *words)), "COMP_CWORD": str(len(words)),
    }  # fmt: skip
    command = [sys.executable, "-P", "-c", "from gateway.ctl import main; main()"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=patient(30)).stdout.split()


@pytest.mark.parametrize(
    "verb",
    [*scaled(["chat", "info", "bench", "calibrate", "logs", "rm", "restart", "verify"], []), "load", "unload"],
)
def test_a_shell_completes_the_names_of_models(tmp_path: Path, verb: str) -> None:
    (tmp_path / "mlxd.toml").write_text('[models.coder]\naliases = ["code-fast", "claude-*"]\n[models.small]\n')

    assert complete(tmp_path, verb, "co") == ["coder", "code-fast"]


def test_a_shell_completes_verbs_and_is_not_told_what_is_wrong_with_a_file(tmp_path: Path) -> None:
    (tmp_path / "mlxd.toml").write_text("nonsense")

    assert complete(tmp_path, "load", "co") == []
    assert complete(tmp_path, "unl") == ["unload"]


def test_what_is_in_the_cache_is_completed_where_it_can_be_removed(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--org--tiny" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "hub" / "models--org--tiny" / "refs").mkdir()
    (tmp_path / "hub" / "models--org--tiny" / "refs" / "main").write_text("abc")
    (snapshot / "config.json").write_text('{"model_type": "llama"}')
    (snapshot / "model.safetensors").write_text("")
    (snapshot / "tokenizer.json").write_text("{}")
    (tmp_path / "mlxd.toml").write_text("[models.small]\n")

    assert complete(tmp_path, "rm", "org") == ["org/tiny"]
    assert complete(tmp_path, "load", "org") == []


def test_what_would_be_done_to_a_service_can_be_read_by_a_script(tmp_path: Path) -> None:
    done = ctl(tmp_path, "service", "start", "--dry-run", "--manager", "systemd", "--json")
    found = json.loads(done.stdout)

    assert found["done"] is False
    assert found["actions"][0]["type"] == "Run"
    assert "systemctl" in found["actions"][0]["argv"]
