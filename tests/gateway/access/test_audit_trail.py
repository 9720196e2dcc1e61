"""Lines of the audit log that the daemon and mlxctl keys write."""

import os
import signal
import struct
from collections.abc import Generator
from pathlib import Path

import msgspec
import pytest

from gateway.access.audit_log import Audit, AuditEntry, AuditTrail, entry
from gateway.access.key import Key, KeyFile
from gateway.access.keyring import ADDRESSES_MAX, KeyAddresses
from gateway.config.address import Address
from gateway.control.commands import from_ucred, from_xucred
from gateway.state_dir import audit_path
from gateway.telemetry.logs import last_lines
from tests.gateway.harness import running, until
from tests.support.ctl import ctl
from tests.support.daemon import DaemonProcess, write_config

_decoder = msgspec.json.Decoder(AuditEntry)


def entries(home: Path) -> list[AuditEntry]:
    return [_decoder.decode(line) for line in last_lines(audit_path(home), 100_000)]


def key_file(home: Path) -> KeyFile:
    return KeyFile(home / "keys" / "keys.json")


def blank(name: str = "k", **fields: object) -> Key:
    return Key(name=name, prefix="", salt="", hash="", **fields)  # pyright: ignore[reportArgumentType]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


# -- keys ------------------------------------------------------------------------------------------------------------


def test_every_change_of_a_key_is_a_line_without_its_secret(tmp_path: Path) -> None:
    file = key_file(tmp_path)
    made, secret = file.create(blank("alice", models=("a*", "b"), rpm=60))
    file.change("alice", rpm=120, is_disabled=True)
    rotated, fresh = file.rotate("alice")
    file.change("alice", rpm=120)
    file.revoke("alice")

    told = [(line.action, line.target, line.outcome, line.facts) for line in entries(tmp_path)]
    assert [line[:3] for line in told] == [
        (action, "alice", "ok") for action in ("key.create", "key.change", "key.rotate", "key.revoke")
    ]
    assert told[0][3] == {"prefix": made.prefix, "models": "a*, b", "rpm": 60}
    assert told[1][3] == {"rpm": "60 -> 120", "is_disabled": "false -> true"}
    assert told[2][3] == {"prefix": rotated.prefix}
    assert {line.uid for line in entries(tmp_path)} == {os.getuid()}
    text = audit_path(tmp_path).read_text()
    for hidden in (secret, fresh, made.salt, made.hash, made.cache_salt, rotated.hash):
        assert hidden not in text


def test_a_change_that_is_refused_is_none(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="no key"):
        key_file(tmp_path).revoke("nobody")
    assert not audit_path(tmp_path).exists()


def test_a_key_can_be_revoked_while_the_audit_log_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "logs").write_text("in the way")
    file = key_file(tmp_path)
    file.create(blank())
    file.revoke("k")

    assert file.read() == ()
    assert "not in the audit log" in caplog.text


# -- addresses of keys -----------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_the_first_use_of_a_key_from_an_address_is_a_line_also_over_restarts(tmp_path: Path) -> None:
    file = key_file(tmp_path)
    made, secret = file.create(blank())
    for _ in range(2):
        async with running(tmp_path) as gateway:
            for shown in (secret, secret, "wrong"):
                await gateway.client.get("/v1/models", headers={"x-api-key": shown})
    rotated, fresh = file.rotate("k")
    async with running(tmp_path) as gateway:
        await gateway.client.get("/livez", headers={"x-api-key": fresh})

    uses = [line for line in entries(tmp_path) if line.action == "key.address"]
    assert [(line.target, line.client, line.facts) for line in uses] == [
        ("k", "127.0.0.1", {"prefix": made.prefix}),
        ("k", "127.0.0.1", {"prefix": rotated.prefix}),
    ]


def test_addresses_of_one_key_are_bounded_and_those_of_a_customer_are_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trail = AuditTrail(Audit(tmp_path))
    addresses = KeyAddresses(trail, audit_path(tmp_path), ())
    for number in range(2 * ADDRESSES_MAX):
        addresses.use("k", "sk-mlxd-12345678", Address(f"2001:db8:{number:x}::1", 1))
        addresses.use("k", "sk-mlxd-12345678", Address(f"2001:db8:{number:x}::2", 2))
    trail.close()

    assert len(entries(tmp_path)) == ADDRESSES_MAX
    assert caplog.text.count("further ones are not recorded") == 1


def test_a_line_or_an_audit_log_that_cannot_be_read_costs_the_addresses_in_it_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    audit, prefix = Audit(tmp_path), "sk-mlxd-12345678"
    for client in ("no:address", "192.0.2.1"):
        audit.record(entry("key.address", "k", client=client, facts={"prefix": prefix}))
    trail = AuditTrail(audit)
    addresses = KeyAddresses(trail, audit_path(tmp_path), [prefix])
    addresses.use("k", prefix, Address("192.0.2.1", 1))
    trail.close()
    assert len(entries(tmp_path)) == 2

    audit_path(tmp_path).rename(tmp_path / "old")
    audit_path(tmp_path).mkdir()
    KeyAddresses(AuditTrail(Audit(tmp_path)), audit_path(tmp_path), [prefix])
    assert "cannot be read" in caplog.text


# -- orders over the unix socket -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Generator[DaemonProcess, None, None]:
    home = tmp_path_factory.mktemp("h")
    write_config(home, server="capture = 5")
    with DaemonProcess(home) as started:
        yield started


def newest(home: Path, before: int) -> list[AuditEntry]:
    return entries(home)[before:]


@pytest.mark.anyio
async def test_orders_are_lines_with_the_user_and_process_that_gave_them(daemon: DaemonProcess) -> None:
    home = daemon.home
    before = len(entries(home)) if audit_path(home).exists() else 0
    assert ctl(home, "load", "a").returncode == 0
    assert ctl(home, "pin", "a").returncode == 0
    assert ctl(home, "load", "nope").returncode != 0
    assert ctl(home, "cancel", "none").returncode != 0
    await until(lambda: len(newest(home, before)) == 4)

    found = newest(home, before)
    assert [(line.action, line.target, line.outcome) for line in found] == [
        ("model.load", "a", "ok"),
        ("model.pin", "a", "ok"),
        ("model.load", "nope", "model_not_found"),
        ("request.cancel", "none", "request_not_found"),
    ]
    assert {(line.client, line.uid) for line in found} == {("unix", os.getuid())}
    # Each was a process of its own, and none is the daemon.
    assert len({line.pid for line in found} - {None, daemon.process.pid}) == 4


@pytest.mark.anyio
async def test_a_captured_request_that_is_read_is_a_line_and_others_are_none(daemon: DaemonProcess) -> None:
    home = daemon.home
    daemon.client.post(
        "/v1/completions", headers={"x-request-id": "mine"}, json={"model": "a", "prompt": "hi", "max_tokens": 1}
    )
    before = len(entries(home)) if audit_path(home).exists() else 0
    assert ctl(home, "status").returncode == 0
    assert ctl(home, "requests", "show", "mine").returncode == 0
    assert ctl(home, "requests", "--captured").returncode == 0
    await until(lambda: len(newest(home, before)) == 1)

    [line] = newest(home, before)
    assert (line.action, line.target, line.outcome) == ("capture.read", "mine", "ok")


@pytest.mark.anyio
async def test_reloads_are_lines_with_what_changed_by_socket_and_by_signal(daemon: DaemonProcess) -> None:
    home = daemon.home
    before = len(entries(home)) if audit_path(home).exists() else 0
    write_config(home, server="capture = 5\nslow_request = 9")
    assert ctl(home, "config", "reload").returncode == 0
    write_config(home, server="capture = 5\nslow_request = 8\nnope = 1")
    daemon.process.send_signal(signal.SIGHUP)
    await until(lambda: len(newest(home, before)) == 2)
    write_config(home, server="capture = 5")
    daemon.process.send_signal(signal.SIGHUP)
    await until(lambda: len(newest(home, before)) == 3)

    asked, bad, good = newest(home, before)
    assert (asked.action, asked.outcome, asked.client) == ("config.reload", "ok", "unix")
    assert asked.facts == {"changed": ["server.slow_request"]}
    assert asked.uid == os.getuid()
    assert (bad.outcome, bad.client, bad.facts, bad.uid) == ("bad_config", "signal", {}, None)
    assert (good.outcome, good.facts) == ("ok", {"changed": ["server.slow_request"]})


def test_the_end_of_a_daemon_is_a_line_too_and_mlxctl_shows_all(tmp_path: Path) -> None:
    write_config(tmp_path)
    with DaemonProcess(tmp_path) as daemon:
        assert ctl(tmp_path, "keys", "create", "alice", "--rpm", "5").returncode == 0
        assert ctl(tmp_path, "drain").returncode == 0
        assert daemon.wait() == 0

    shown = ctl(tmp_path, "logs", "--audit").stdout.splitlines()
    assert [line.split()[1:3] for line in shown] == [["key.create", "alice"], ["daemon.drain", "-"]]
    assert f"outcome=ok uid={os.getuid()} pid=" in shown[0]
    assert "rpm=5" in shown[0]
    assert ctl(tmp_path, "logs", "--audit", "--json").stdout.splitlines() == last_lines(audit_path(tmp_path), 10)


def test_a_line_that_cannot_be_written_is_counted_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "logs").write_text("in the way")
    trail = AuditTrail(Audit(tmp_path))
    trail.record(entry("model.unload", "m"))
    trail.close()

    assert trail.lost == 1
    assert "not in the audit log" in caplog.text


def test_credentials_are_read_as_each_system_writes_them() -> None:
    linux = from_ucred(struct.pack("=iII", 4711, 501, 20))
    mac = from_xucred(struct.pack("=IIh2x16I", 0, 501, 1, *range(16)), struct.pack("=i", 4711))

    assert (linux.uid, linux.pid) == (mac.uid, mac.pid) == (501, 4711)
