"""Commands that start clients: what is in their variables, arguments and temporary files."""

import json
import tomllib
from pathlib import Path

import pytest

from gateway.client_setup.clients import CLIENTS, Endpoint, launch, program_of, programs
from gateway.command_failed import CommandFailed

TO = Endpoint("http://127.0.0.1:8484", "coder", 65536)
KEY = "sk-mlxd-secret"


def test_a_client_that_no_program_starts_is_told_its_other_way() -> None:
    assert set(programs()) == set(CLIENTS) - {"cursor", "llm"}
    with pytest.raises(CommandFailed, match="mlxctl connect cursor"):
        program_of("cursor")
    assert program_of("claude-code") == "claude"


@pytest.mark.parametrize("client", programs())
def test_no_key_is_in_arguments_which_every_user_of_a_machine_can_read(client: str, tmp_path: Path) -> None:
    command = launch(client, Endpoint("http://127.0.0.1:8484", "coder", 65536, KEY), tmp_path)

    assert KEY not in " ".join(command.arguments)
    files = "".join(file.read_text() for file in tmp_path.rglob("*.*") if file.is_file())
    assert KEY in files + json.dumps(command.env)


def test_codex_takes_its_settings_as_arguments_in_toml(tmp_path: Path) -> None:
    command = launch("codex", TO, tmp_path)

    words = command.arguments
    assert words[::2] == ("-c",) * (len(words) // 2)
    read = tomllib.loads("\n".join(words[1::2]))
    assert (read["model"], read["model_provider"]) == ("coder", "mlxd")
    assert read["model_providers"]["mlxd"]["base_url"] == "http://127.0.0.1:8484/v1"


def test_claude_code_has_its_variables_also_where_they_precede_the_users_file(tmp_path: Path) -> None:
    command = launch("claude", TO, tmp_path)

    option, file = command.arguments
    assert (option, json.loads(Path(file).read_text())["env"]) == ("--settings", command.env)
    assert "ANTHROPIC_API_KEY" in command.removed


def test_pi_keeps_what_its_user_has_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    own, folder = tmp_path / ".pi" / "agent", tmp_path / "once"
    own.mkdir(parents=True)
    folder.mkdir()
    (own / "auth.json").write_text("{}")
    (own / "models.json").write_text('{"providers": {"cloud": {"baseUrl": "https://example.org"}}}')
    command = launch("pi", TO, folder)

    assert command.env == {"PI_CODING_AGENT_DIR": str(folder)}
    assert (folder / "auth.json").resolve() == own / "auth.json"
    assert set(json.loads((folder / "models.json").read_text())["providers"]) == {"cloud", "mlxd"}
    assert "mlxd" not in (own / "models.json").read_text()
