import os
import stat
import threading
from pathlib import Path

import pytest

from gateway.keys import NAME, Key, KeyFile, KeyRefused, KeysUnusable, digest


def key(name: str = "k", **fields: object) -> Key:
    return Key(name=name, prefix="", salt="", hash="", **fields)  # pyright: ignore[reportArgumentType]


@pytest.fixture
def file(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "home" / "keys" / "keys.json")


def test_only_a_salted_hash_and_a_prefix_of_a_secret_are_kept(file: KeyFile) -> None:
    made, secret = file.create(key())
    text = file.path.read_text()

    assert len(secret) >= len("sk-mlxd-") + 43
    assert secret not in text
    assert secret.startswith(made.prefix)
    assert secret[len(made.prefix) :] not in text
    assert made.is_opened_by(secret.encode())
    assert not made.is_opened_by(secret.encode() + b"x")
    assert not made.is_opened_by(b"")
    assert digest(made.salt, secret.encode()) != digest("00" * 16, secret.encode())
    assert file.read() == (made,)


def test_the_file_and_its_folders_are_private(file: KeyFile) -> None:
    file.create(key())

    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(file.path.parent.parent.stat().st_mode) == 0o700
    assert sorted(path.name for path in file.path.parent.iterdir()) == ["keys.json", "lock"]


def test_every_change_changes_the_stamp(file: KeyFile) -> None:
    stamps = [file.stamp()]
    file.create(key())
    stamps.append(file.stamp())
    file.rotate("k")
    stamps.append(file.stamp())
    file.revoke("k")
    stamps.append(file.stamp())

    assert stamps[0] is None
    assert len(set(stamps)) == 4


def test_rotation_changes_the_secret_and_nothing_else(file: KeyFile) -> None:
    before, old = file.create(key(models=("a*",), rpm=5))
    after, new = file.rotate("k")

    assert not after.is_opened_by(old.encode())
    assert after.is_opened_by(new.encode())
    assert (after.models, after.rpm, after.cache_salt, after.created) == (
        before.models, before.rpm, before.cache_salt, before.created,
    )  # fmt: skip


def test_each_key_has_a_prefix_cache_of_its_own_unless_it_shares(file: KeyFile) -> None:
    first, _ = file.create(key("a"))
    second, _ = file.create(key("b"))
    third, _ = file.create(key("c"), shares_cache=True)

    assert first.cache_salt
    assert first.cache_salt != second.cache_salt
    assert third.cache_salt == ""


@pytest.mark.parametrize("name", ["", "-a", "a b", "a\nb", "é", "x" * 65, 'a"b', "../a"])
def test_a_name_that_logs_and_metrics_cannot_show_is_refused(file: KeyFile, name: str) -> None:
    assert not NAME.fullmatch(name)
    with pytest.raises(KeyRefused, match="cannot be used"):
        file.create(key(name))
    assert file.stamp() is None


def test_names_are_unique_and_unknown_ones_are_refused_with_those_that_exist(file: KeyFile) -> None:
    file.create(key("a"))

    with pytest.raises(KeyRefused, match="already"):
        file.create(key("a"))
    for change in (file.revoke, file.rotate):
        with pytest.raises(KeyRefused, match="no key 'b'; keys: a"):
            change("b")


@pytest.mark.parametrize(
    "fields",
    [
        {"rpm": 10**13},
        {"rpm": -1},
        {"priority": 1000},
        {"models": ("",)},
        {"is_admin": True, "rpm": 1},
        {"is_metrics_only": True, "is_admin": True},
        {"is_metrics_only": True, "models": ("a",)},
    ],
)
def test_what_could_not_be_read_again_is_never_written(file: KeyFile, fields: dict[str, object]) -> None:
    with pytest.raises(KeyRefused):
        file.create(key(**fields))
    assert file.read() == ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "truncated"),
        ("{", "truncated"),
        ("[]", "Expected `object`"),
        ('{"keys": [], "version": 2}', "version 2"),
        ('{"keys": [], "extra": 1}', "unknown field"),
        ('{"keys": [{"name": "a"}]}', "missing required field"),
        ('{"keys": [{"name": "a", "prefix": "", "salt": "zz", "hash": ""}]}', "salt is damaged"),
        ('{"keys": [{"name": "\x80", "prefix": "", "salt": "", "hash": ""}]}', ""),
    ],
)
def test_a_damaged_file_is_refused_with_its_path(file: KeyFile, text: str, expected: str) -> None:
    file.path.parent.mkdir(parents=True)
    file.path.write_bytes(text.encode("latin-1"))
    file.path.chmod(0o600)

    with pytest.raises(KeysUnusable) as caught:
        file.read()
    assert str(file.path) in str(caught.value)
    assert expected in str(caught.value)
    with pytest.raises(KeysUnusable):
        file.create(key())
    assert file.path.read_bytes() == text.encode("latin-1")


def test_a_file_that_others_can_write_is_refused(file: KeyFile) -> None:
    file.create(key())
    file.path.chmod(0o620)

    with pytest.raises(KeysUnusable, match="chmod 600"):
        file.read()


def test_changes_at_once_are_all_kept(file: KeyFile) -> None:
    threads = [threading.Thread(target=file.create, args=(key(f"k{n}"),)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(found.name for found in file.read()) == sorted(f"k{n}" for n in range(12))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file for others")
def test_a_key_that_root_makes_in_a_services_home_is_the_services(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, 12345, 12345)

    KeyFile(home / "keys" / "keys.json").create(key())

    assert {path.stat().st_uid for path in (home / "keys", *(home / "keys").iterdir())} == {12345}
