"""`[peers.NAME]`: what makes a peer, and what is refused with its line."""

from pathlib import Path

import pytest

from gateway.access.key_file import has_keys
from gateway.config.load import load_config
from gateway.config.settings import ConfigError


def load(folder: Path, peer: str, name: str = "b") -> str:
    """The message of the error; empty where there is none."""
    (folder / "b.key").write_text("sk-mlxd-secret\n")
    (folder / "mlxd.toml").write_text(f"[models.m]\n[peers.{name}]\n{peer}\n")
    try:
        config = load_config(folder, has_keys=has_keys)
    except ConfigError as error:
        return str(error) if error.line in (2, 3, 4, 5) else f"no line: {error}"
    assert config.peers["b"].key_file == str(folder / "b.key")
    return ""


@pytest.mark.parametrize(
    "url", ["https://studio.local:8484", "https://studio.local/", "http://127.0.0.1:1", "http://[::1]:8484"]
)
def test_https_and_the_loopback_are_peers(tmp_path: Path, url: str) -> None:
    assert load(tmp_path, f'url = "{url}"\nkey_file = "b.key"') == ""


def test_plain_http_beyond_the_loopback_is_refused_unless_said_otherwise(tmp_path: Path) -> None:
    plain = 'url = "http://10.0.0.2:8484"\nkey_file = "b.key"'
    assert "plain HTTP" in load(tmp_path, plain)
    assert load(tmp_path, f"{plain}\nplain_http = true") == ""


@pytest.mark.parametrize(
    ("peer", "told"),
    [
        ('key_file = "b.key"', "needs url"),
        ('url = "https://a"', "needs key_file"),
        ('url = "ftp://a"\nkey_file = "b.key"', "must be https"),
        ('url = "https://a/v1"\nkey_file = "b.key"', "no path"),
        ('url = "https://u:p@a"\nkey_file = "b.key"', "no path, query or user"),
        ('url = "https://a:99999"\nkey_file = "b.key"', "is no URL"),
        ('url = "https://a"\nkey_file = "nope.key"', "nope.key"),
        ('url = "https://a"\nkey_file = "b.key"\nca = "b.key"', "certificates"),
        ('url = "https://a"\nkey_file = "b.key"\nurls = 1', "unknown key"),
    ],
)
def test_what_cannot_be_a_peer_is_an_error_with_its_line(tmp_path: Path, peer: str, told: str) -> None:
    assert told in load(tmp_path, peer)


def test_names_that_would_hide_models_are_refused(tmp_path: Path) -> None:
    good = 'url = "https://a"\nkey_file = "b.key"'
    assert "'/'" in load(tmp_path, good, '"a/b"')
    assert "name of a model" in load(tmp_path, good, "m")
