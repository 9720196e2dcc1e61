"""Keys of earlier versions: a file with one is an error that says what holds now."""

from pathlib import Path

import pytest

from gateway.config.load import load_config
from gateway.config.settings import Config, ConfigError, file_key
from gateway.config.source import (
    REMOVED,
    _all_tables,  # pyright: ignore[reportPrivateUsage]
    what_holds_now,
)

KEYS = [key for key in REMOVED if "." in key]


def refusal(home: Path, text: str) -> str:
    (home / "mlxd.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(home, has_keys=lambda _: True)
    return str(caught.value)


@pytest.mark.parametrize("key", KEYS)
def test_a_removed_key_is_named_with_its_line_and_what_holds_now(key: str, tmp_path: Path) -> None:
    table, _, name = key.replace("NAME", "m").rpartition(".")
    reason = refusal(tmp_path, f"[models.m.sampling]\n[{table}]\n{name} = 1\n")
    assert f"{name} is gone: {REMOVED[key]}" in reason
    assert "mlxd.toml:" in reason


def test_a_removed_key_is_known_with_its_unit_too(tmp_path: Path) -> None:
    reason = refusal(tmp_path, "[models.m]\n[server]\nlog_max_bytes = 65536\n")
    assert reason.endswith("mlxd.toml:3: log_max_bytes is gone: a log file has at most 16 MiB")
    assert "capture_age_s is gone" in refusal(tmp_path, "[models.m]\n[server]\ncapture_age_s = 1\n")


def test_a_removed_table_is_named_with_what_holds_now(tmp_path: Path) -> None:
    assert "mlxd.toml:2: [audio] is gone: a file to transcribe" in refusal(tmp_path, "[models.m]\n[audio]\n")


def test_a_key_of_a_table_that_became_a_value_says_what_to_write(tmp_path: Path) -> None:
    reason = refusal(tmp_path, "[models.m]\nsparse_prefill = { keep = 0.5 }\n")
    assert reason.endswith("mlxd.toml:2: keep is gone: " + REMOVED["models.NAME.sparse_prefill.keep"])


def test_no_key_of_today_is_listed_as_removed() -> None:
    tables = {"": Config, **dict(_all_tables())}
    today = {
        ".".join(part for part in (table, file_key(name)) if part)
        for table, struct in tables.items()
        for name in struct.__struct_fields__
    }
    assert "server.port" in today
    assert not today & REMOVED.keys()


def test_names_of_models_do_not_hide_a_removed_key() -> None:
    assert what_holds_now(("models", "any/name", "cache", "disk_min_tokens"))
    assert not what_holds_now(("models", "log_max"))
    assert not what_holds_now(("server", "zzz"))
