"""`[upstreams.NAME]`: what makes an upstream, and what is refused with its line. Peers are no more."""

from pathlib import Path

import pytest

from gateway.access.key import has_keys
from gateway.config.load import load_config
from gateway.config.settings import ConfigError


def load(folder: Path, upstream: str) -> str:
    """The message of the error; empty where there is none."""
    (folder / "b.key").write_text("sk-secret\n")
    (folder / "mlxd.toml").write_text(f"[models.m]\n[upstreams.b]\n{upstream}\n")
    try:
        config = load_config(folder, has_keys=has_keys)
    except ConfigError as error:
        return str(error) if error.line in (2, 3, 4, 5) else f"no line: {error}"
    assert config.upstreams["b"].key_file == str(folder / "b.key")
    return ""


@pytest.mark.parametrize("url", ["https://api.example/v1", "https://a", "http://127.0.0.1:1/v1", "http://[::1]:8484"])
def test_https_and_the_loopback_are_upstreams(tmp_path: Path, url: str) -> None:
    assert load(tmp_path, f'url = "{url}"\nkey_file = "b.key"') == ""


def test_plain_http_beyond_the_loopback_is_refused_unless_said_otherwise(tmp_path: Path) -> None:
    plain = 'url = "http://10.0.0.2:8484/v1"\nkey_file = "b.key"'
    assert "plain HTTP" in load(tmp_path, plain)
    assert load(tmp_path, f"{plain}\nplain_http = true") == ""


@pytest.mark.parametrize(
    ("upstream", "told"),
    [
        ('key_file = "b.key"', "needs url"),
        ('url = "ftp://a"\nkey_file = "b.key"', "must be https"),
        ('url = "https://u:p@a"\nkey_file = "b.key"', "no query or user"),
        ('url = "https://a/v1?x=1"\nkey_file = "b.key"', "no query or user"),
        ('url = "https://a:99999"\nkey_file = "b.key"', "is no URL"),
        ('url = "https://a"\nkey_file = "nope.key"', "nope.key"),
        ('url = "https://a"\nkey_file = "b.key"\nurls = 1', "unknown key"),
    ],
)
def test_what_cannot_be_an_upstream_is_an_error_with_its_line(tmp_path: Path, upstream: str, told: str) -> None:
    assert told in load(tmp_path, upstream)


def test_authorities_that_the_environment_names_must_be_certificates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "b.key"))
    reason = load(tmp_path, 'url = "https://a"\nkey_file = "b.key"')
    assert "SSL_CERT_FILE" in reason
    assert "holds no certificates" in reason


def test_peers_are_refused_with_the_page_that_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "mlxd.toml").write_text('[models.m]\n[peers.b]\nurl = "https://a"\n')
    with pytest.raises(ConfigError, match=r"mlxd.toml:2: \[peers\] is gone: .*docs/fleet\.md"):
        load_config(tmp_path, has_keys=has_keys)
