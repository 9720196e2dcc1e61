import fcntl
import json
import logging
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.access.key import NAME, Key, KeyFile, KeyRefused, KeysUnusable, digest
from gateway.access.keyring import Keyring
from gateway.telemetry.metrics import Metrics
from tests.support.users import SERVICE, as_root, as_service, assert_untouched, precious, service_home


def key(name: str = "k", **fields: Any) -> Key:
    return Key(name=name, prefix="", salt="", hash="", **fields)


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
    assert (after.models, after.rpm, after.cache_salt, after.created, after.owner) == (
        before.models, before.rpm, before.cache_salt, before.created, before.owner,
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
def test_what_could_not_be_read_again_is_never_written(file: KeyFile, fields: dict[str, Any]) -> None:
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


def edited(file: KeyFile, edit: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The file with a change that a later version might have made."""
    contents = json.loads(file.path.read_bytes())
    edit(contents)
    file.path.write_text(json.dumps(contents))
    return contents


def test_what_a_later_version_has_written_is_ignored_and_kept_on_every_change(file: KeyFile) -> None:
    file.create(key("a", rpm=5))
    file.create(key("b"))

    def later(contents: dict[str, Any]) -> None:
        contents["groups"] = [{"name": "team"}]
        contents["keys"][0]["group"] = {"name": "team", "weight": 2}

    edited(file, later)
    assert [one.name for one in file.read()] == ["a", "b"]
    assert file.unknown() == ["group", "groups"]

    file.create(key("c"))
    file.rotate("a")
    file.change("a", rpm=7)
    file.revoke("b")
    contents = json.loads(file.path.read_bytes())
    assert contents["groups"] == [{"name": "team"}]
    assert contents["keys"][0]["group"] == {"name": "team", "weight": 2}
    assert "group" not in contents["keys"][1]
    assert file.read()[0].rpm == 7


def test_the_file_says_of_a_key_only_what_differs_from_the_defaults(file: KeyFile) -> None:
    """An older mlxd logs the fields that it does not know."""
    file.create(key("plain", rpm=5))
    file.create(key("later", tokens_per_day=9))
    file.change("later", tokens_per_day=0)
    file.change("plain", is_disabled=True)
    file.change("plain", is_disabled=False)

    written = [set(one) for one in json.loads(file.path.read_bytes())["keys"]]
    common = {"name", "prefix", "salt", "hash", "cache_salt", "created", "id"}
    assert written == [common | {"rpm"}, common]
    assert [(one.rpm, one.alert_at) for one in file.read()] == [(5, 80), (0, 80)]


def test_a_key_that_requires_what_only_a_later_version_knows_opens_nothing(file: KeyFile) -> None:
    file.create(key("a"))
    edited(file, lambda contents: contents["keys"][0].update(requires=["addresses"], addresses=["10.0.0.0/8"]))

    assert not file.read()[0].is_usable
    assert file.create(key("b", requires=("rpm",)))[0].is_usable


def test_a_key_is_changed_in_place_and_its_secret_stays(file: KeyFile) -> None:
    _, secret = file.create(key("a", rpm=5, models=("x",)))
    changed = file.change("a", rpm=60, models=(), is_disabled=True)

    assert changed.is_opened_by(secret.encode())
    # An mlxd before this field would let the key in.
    assert changed.requires == ("is_disabled",)
    assert file.change("a", is_disabled=False).requires == ()
    changed = file.change("a", is_disabled=True)
    assert (changed.rpm, changed.models, changed.is_usable) == (60, (), False)
    assert file.read() == (changed,)
    with pytest.raises(KeyRefused):
        file.change("a", rpm=-1)
    with pytest.raises(KeyRefused, match="no limits"):
        file.change("a", is_admin=True)
    with pytest.raises(KeyRefused, match="no key 'z'"):
        file.change("z", rpm=1)
    assert file.read() == (changed,)


# -- root in a service's home ----------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return service_home(tmp_path)


@as_root
def test_a_key_that_root_makes_in_a_services_home_is_the_services(home: Path) -> None:
    file = KeyFile(home / "keys" / "keys.json")
    file.create(key())
    assert {path.stat().st_uid for path in (home / "keys", *(home / "keys").iterdir())} == {SERVICE}

    as_service(lambda: file.create(key("own")))
    file.change("own", rpm=3)
    assert {path.stat().st_uid for path in (home / "keys").iterdir()} == {SERVICE}


@as_root
def test_root_follows_no_folder_of_keys_that_is_a_link(home: Path, tmp_path: Path) -> None:
    target = precious(tmp_path / "etc")
    as_service(lambda: (home / "keys").symlink_to(target))
    file = KeyFile(home / "keys" / "keys.json")

    with pytest.raises(KeysUnusable, match="symbolic link"):
        file.create(key())
    with pytest.raises(KeysUnusable, match="symbolic link"):
        file.read()
    assert_untouched(target)


@as_root
def test_root_follows_no_home_that_is_the_services_link(home: Path, tmp_path: Path) -> None:
    target = precious(tmp_path / "etc")
    as_service(lambda: (home / ".mlxd").symlink_to(target))

    with pytest.raises(KeysUnusable, match="symbolic link of user 12345"):
        KeyFile(home / ".mlxd" / "keys" / "keys.json").create(key())
    assert_untouched(target)


@as_root
@pytest.mark.parametrize("name", ["lock", "keys.json"])
def test_root_neither_follows_nor_gives_away_a_file_that_is_linked_into_the_folder(
    home: Path, tmp_path: Path, name: str
) -> None:
    target = precious(tmp_path / "etc")
    as_service(lambda: (home / "keys").mkdir())
    for link in (lambda: (home / "keys" / name).symlink_to(target / "shadow"),
                 lambda: os.link(target / "shadow", home / "keys" / name)):  # fmt: skip
        link()
        with pytest.raises(KeysUnusable):
            KeyFile(home / "keys" / "keys.json").create(key())
        assert_untouched(target)
        (home / "keys" / name).unlink()


@as_root
def test_root_takes_no_file_of_another_user_or_with_another_name_for_the_keys(home: Path, tmp_path: Path) -> None:
    other = KeyFile(tmp_path / "other" / "keys" / "keys.json")
    (tmp_path / "other").mkdir()
    other.create(key("others"))
    as_service(lambda: (home / "keys").mkdir())
    file = KeyFile(home / "keys" / "keys.json")

    os.link(other.path, file.path)
    with pytest.raises(KeysUnusable, match="user 0's"):
        file.create(key())
    file.path.unlink()
    as_service(lambda: ((home / "mine").write_text("{}"), os.link(home / "mine", file.path)))
    with pytest.raises(KeysUnusable, match="another name"):
        file.create(key())


@as_root
def test_a_service_that_holds_the_lock_does_not_hold_root_for_good(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = KeyFile(home / "keys" / "keys.json")
    file.create(key())
    monkeypatch.setattr("gateway.state_dir.LOCK_TIMEOUT_S", 0.1)
    holder = os.open(home / "keys" / "lock", os.O_RDWR)
    fcntl.flock(holder, fcntl.LOCK_EX)

    with pytest.raises(KeysUnusable, match="has not ended"):
        file.create(key("b"))
    os.close(holder)
    file.create(key("b"))


def test_the_log_tells_how_many_of_the_keys_are_in_force(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = KeyFile(tmp_path / "keys" / "keys.json")
    file.create(Key(name="k", prefix="", salt="", hash=""))
    file.change("k", is_disabled=True)
    with caplog.at_level(logging.INFO):
        Keyring(file, Metrics())
    assert "0 of 1 API keys are in force" in caplog.text
