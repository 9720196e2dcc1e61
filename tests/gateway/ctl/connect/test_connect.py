import json
import os
import stat
import tempfile
import tomllib
from pathlib import Path

import pytest

from gateway.client_setup.config_edit import ConfigEdit, FileFormat, write
from gateway.command_failed import CommandFailed
from tests.support.ctl import ctl

CONFIG = """
[server]
port = 9123
[models.small]
path = "org/small"
context = 4096
[models.coder]
path = "org/coder"
context = 65536
aliases = ["default", "gpt-*"]
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of mlxd without a daemon, and beside it the user's, which is empty."""
    home = tmp_path / "mlxd"
    home.mkdir()
    (home / "mlxd.toml").write_text(CONFIG)
    for name in ("CODEX_HOME", "XDG_CONFIG_HOME", "LLM_USER_PATH", "MLXD_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return home


def test_what_is_printed_is_what_would_be_written(home: Path, tmp_path: Path) -> None:
    printed = ctl(home, "connect", "codex")
    assert printed.returncode == 0, printed.stderr
    place, _, rest = printed.stdout.partition(":\n\n")
    text, _, command = rest.rpartition("Start it: ")
    assert not (tmp_path / ".codex").exists()
    written = ctl(home, "connect", "codex", "--write")

    file = tmp_path / ".codex" / "config.toml"
    assert (place, command) == ("~/.codex/config.toml", "codex\n")
    assert file.read_text().strip() == text.strip()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert written.stdout == f"{file} is written\nStart it: codex\n"
    settings = tomllib.loads(text)
    assert (settings["model"], settings["model_providers"]["mlxd"]["base_url"]) == ("coder", "http://127.0.0.1:9123/v1")


def test_what_a_file_was_is_kept_and_a_second_write_does_nothing(home: Path, tmp_path: Path) -> None:
    file = tmp_path / ".claude" / "settings.json"
    file.parent.mkdir()
    # A link into a folder of dot files stays a link.
    real = tmp_path / "dotfiles.json"
    real.write_text('{"theme": "dark"}')
    real.chmod(0o640)
    file.symlink_to(real)
    first = ctl(home, "connect", "claude", "--write", "--model", "small", "--json")
    second = ctl(home, "connect", "claude", "--write", "--model", "small", "--json")

    [done] = json.loads(first.stdout)["files"]
    assert Path(done["backup"]).read_text() == '{"theme": "dark"}'
    assert file.is_symlink()
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    settings = json.loads(real.read_text())
    assert settings["theme"] == "dark"
    assert settings["env"]["ANTHROPIC_MODEL"] == "small"
    assert json.loads(second.stdout)["files"] == [{"path": str(real), "backup": "", "is_unchanged": True}]
    assert len(list(tmp_path.glob("dotfiles.json*"))) == 2


def test_a_file_that_cannot_be_kept_whole_is_not_written(home: Path, tmp_path: Path) -> None:
    file = tmp_path / ".config" / "opencode" / "opencode.json"
    file.parent.mkdir(parents=True)
    file.write_text('{"theme": "x", // mine\n}')
    done = ctl(home, "connect", "opencode", "--write")

    assert done.returncode == 1
    assert "was not changed: it is no plain JSON" in done.stderr
    assert file.read_text() == '{"theme": "x", // mine\n}'
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("content", [b"5", b"null", b"caf\xe9", b'{"theme": "\\ud800"}'])
def test_a_file_that_is_no_object_or_no_text_is_refused_in_a_sentence(
    home: Path, tmp_path: Path, content: bytes
) -> None:
    file = tmp_path / ".claude" / "settings.json"
    file.parent.mkdir()
    file.write_bytes(content)
    done = ctl(home, "connect", "claude", "--write")

    assert (done.returncode, "was not changed: it" in done.stderr) == (1, True)
    assert "Traceback" not in done.stderr
    assert file.read_bytes() == content
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("url", ["http://a\nEVIL=1", "mac.local:8484", "http://a b", "http://a/?x"])
def test_an_address_that_is_none_is_refused(home: Path, tmp_path: Path, url: str) -> None:
    done = ctl(home, "connect", "qwen", "--write", "--url", url)

    assert (done.returncode, "--url" in done.stderr) == (2, True)
    assert not (tmp_path / ".qwen").exists()


def test_a_file_that_gets_a_key_becomes_its_owners_alone(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLXD_KEY", ctl(home, "keys", "create", "claude").stdout.strip())
    file = tmp_path / ".claude" / "settings.json"
    file.parent.mkdir()
    file.write_bytes(b'{"theme":\r\n "dark"}')
    file.chmod(0o644)
    done = json.loads(ctl(home, "connect", "claude", "--write", "--json").stdout)["files"][0]

    modes = [stat.S_IMODE(path.stat().st_mode) for path in (file, Path(done["backup"]))]
    assert modes == [0o600, 0o600]
    assert Path(done["backup"]).read_bytes() == b'{"theme":\r\n "dark"}'
    # One that a version before has left readable.
    file.chmod(0o644)
    assert ctl(home, "connect", "claude", "--write").returncode == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_with_keys_the_clients_key_is_wanted_and_comes_from_a_variable(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = ctl(home, "keys", "create", "pi").stdout.strip()
    without = ctl(home, "connect", "pi")
    monkeypatch.setenv("MLXD_KEY", key)
    given = json.loads(ctl(home, "connect", "pi", "--json").stdout)

    assert without.returncode == 1
    assert "put one of this client into MLXD_KEY" in without.stderr
    assert json.loads(given["files"][0]["text"])["providers"]["mlxd"]["apiKey"] == key


def test_the_demo_is_taken_only_where_there_is_nothing_else(home: Path) -> None:
    demo = '[models.demo]\naliases = ["default"]\n'
    for more, expected in (("", "demo"), ('[models.real]\npath = "org/real"\n', "real")):
        (home / "mlxd.toml").write_text(demo + more)
        edit = json.loads(ctl(home, "connect", "aider", "--json").stdout)["files"][0]
        assert edit["text"].startswith(f"model: openai/{expected}\n")


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_daemon_on_all_addresses_is_asked_on_the_loopback(
    home: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    # Without a key it would not be open to others.
    monkeypatch.setenv("MLXD_KEY", ctl(home, "keys", "create", "aider").stdout.strip())
    (home / "mlxd.toml").write_text(CONFIG.replace("port", f'host = "{host}"\nport'))
    edit = json.loads(ctl(home, "connect", "aider", "--json").stdout)["files"][0]

    assert "openai-api-base: http://127.0.0.1:9123/v1\n" in edit["text"]


def test_an_unknown_client_or_model_is_told_which_are_known(home: Path) -> None:
    assert "known are claude, codex," in ctl(home, "connect", "emacs").stderr
    assert "models here: small, coder" in ctl(home, "connect", "pi", "--model", "x").stderr
    assert json.loads(ctl(home, "connect", "Claude-Code", "--json").stdout)["client"] == "claude"


def test_what_has_no_file_is_printed_to_be_entered_by_hand(home: Path) -> None:
    printed = ctl(home, "connect", "cursor")
    written = ctl(home, "connect", "cursor", "--write")

    assert printed.returncode == 0
    for text in ("Override OpenAI Base URL  http://127.0.0.1:9123/v1", "custom model              coder"):
        assert text in printed.stdout
    assert (written.returncode, "cursor is configured by hand" in written.stderr) == (1, True)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("demo", "demo is a small model to try mlxd with"),
        ("small", "small has a context of 4096 tokens; the client ne"),
    ],
)
def test_a_model_that_will_disappoint_all_sessions_is_named(home: Path, model: str, expected: str) -> None:
    with (home / "mlxd.toml").open("a") as file:
        file.write('[models.demo]\npath = "demo"\n')
    done = ctl(home, "connect", "claude", "--write", "--model", model)
    good = ctl(home, "connect", "claude", "--write", "--model", "coder")

    assert (done.returncode, expected in done.stderr) == (0, True), done.stderr
    assert "mlxctl connect claude --undo takes it back" in done.stderr
    assert good.stderr == ""


@pytest.mark.parametrize("before", [None, b'{"theme":\r\n"dark"}'])
def test_undo_makes_a_file_what_it_was_before_all_writes(home: Path, tmp_path: Path, before: bytes | None) -> None:
    file = tmp_path / ".claude" / "settings.json"
    if before is not None:
        file.parent.mkdir()
        file.write_bytes(before)
        file.chmod(0o640)
    for model in ("small", "coder"):
        assert ctl(home, "connect", "claude", "--write", "--model", model).returncode == 0
    done = ctl(home, "connect", "claude", "--undo")
    again = ctl(home, "connect", "claude", "--undo")

    assert done.returncode == 0, done.stderr
    if before is None:
        assert not file.parent.exists()
        assert done.stdout == f"{file} is removed, as it was new\n"
    else:
        assert (file.read_bytes(), stat.S_IMODE(file.stat().st_mode)) == (before, 0o640)
        assert list(file.parent.iterdir()) == [file]
        assert done.stdout == f"{file} is as it was\n"
    assert (again.returncode, "has written nothing for claude" in again.stderr) == (1, True)


def test_undo_leaves_a_file_that_was_changed_since_and_says_where_its_text_is(home: Path, tmp_path: Path) -> None:
    folder = tmp_path / ".config" / "opencode"
    folder.mkdir(parents=True)
    file = folder / "opencode.json"
    file.write_text("{}")
    backup = json.loads(ctl(home, "connect", "opencode", "--write", "--json").stdout)["files"][0]["backup"]
    changed = file.read_text().replace("{", '{"theme": "mine",', 1)
    file.write_text(changed)
    done = ctl(home, "connect", "opencode", "--undo")

    assert done.returncode == 1
    assert f"{file} was changed after mlxctl connect had written it, and stays as it is" in done.stderr
    assert f"what it was before is in {backup}" in done.stderr
    assert (file.read_text(), Path(backup).read_text()) == (changed, "{}")


def test_undo_restores_each_file_that_it_can(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path / "llm"))
    assert ctl(home, "connect", "llm", "--write").returncode == 0
    keys = tmp_path / "llm" / "keys.json"
    keys.write_text("{}")
    done = ctl(home, "connect", "llm", "--undo", "--json")

    shown = json.loads(done.stdout)
    assert shown["restored"] == [str(tmp_path / "llm" / "extra-openai-models.yaml")]
    assert [str(keys) in refusal for refusal in shown["changed_since"]] == [True]
    assert list((tmp_path / "llm").iterdir()) == [keys]


def test_a_file_system_without_permissions_gets_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "settings.json"

    # Such as FAT, on which chmod does nothing.
    def unheard(path: str, mode: int) -> None:
        pass

    monkeypatch.setattr("os.chmod", unheard)
    real = os.fchmod

    def readable(*words: object, **named: object) -> tuple[int, str]:
        descriptor, name = mkstemp(*words, **named)  # type: ignore[reportArgumentType]
        real(descriptor, 0o755)
        return descriptor, name

    mkstemp = tempfile.mkstemp
    monkeypatch.setattr("tempfile.mkstemp", readable)
    with pytest.raises(CommandFailed, match="its file system lets other users read it"):
        write(ConfigEdit(str(file), FileFormat.JSON, {"key": "sk-1"}, has_key=True))

    assert list(tmp_path.iterdir()) == []
