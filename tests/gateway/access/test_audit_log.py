import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from gateway.access.audit_log import KEEP, Audit, AuditActor, AuditEntry, AuditUnwritable, entry, this_process
from gateway.state_dir import audit_path
from gateway.telemetry.logs import last_lines
from tests.support.scale import patient

_decoder = msgspec.json.Decoder(AuditEntry)


def entries(home: Path) -> list[AuditEntry]:
    # A process that sees the size of another's line before its end begins with a line end of its own.
    return [_decoder.decode(line) for line in last_lines(audit_path(home), 100_000) if line]


def test_an_entry_says_when_what_to_which_by_which_process_and_how_it_ended(tmp_path: Path) -> None:
    home = tmp_path / "home"
    audit = Audit(home)
    audit.record(entry("key.create", "alice", facts={"rpm": 60, "models": ["a*"]}, clock=lambda: 0.0))
    audit.record(entry("model.load", "m", outcome="model_missing", client="unix", actor=AuditActor(501, 7)))

    made, loaded = entries(home)
    assert (made.time, made.action, made.target, made.outcome) == (
        "1970-01-01T00:00:00.000+00:00", "key.create", "alice", "ok",
    )  # fmt: skip
    assert (made.uid, made.pid, made.facts) == (os.getuid(), os.getpid(), {"rpm": 60, "models": ["a*"]})
    assert (loaded.outcome, loaded.client, loaded.uid, loaded.pid) == ("model_missing", "unix", 501, 7)


def test_an_entry_of_root_names_the_account_that_became_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUDO_UID", "501")
    assert this_process().sudo_uid == (501 if os.geteuid() == 0 else None)
    monkeypatch.setenv("SUDO_UID", "x\n")
    assert this_process().sudo_uid is None


def test_the_audit_log_is_private_from_its_first_byte(tmp_path: Path) -> None:
    home = tmp_path / "home"
    Audit(home).record(entry("daemon.drain"))

    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert stat.S_IMODE((home / "logs").stat().st_mode) == 0o700
    assert stat.S_IMODE(audit_path(home).stat().st_mode) == 0o600


def test_a_full_audit_log_becomes_the_first_of_the_kept_ones(tmp_path: Path) -> None:
    audit = Audit(tmp_path, max_bytes=1000)
    for number in range(100):
        audit.record(entry("key.rotate", f"key-{number}"))

    files = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert files == ["audit.log", *(f"audit.log.{number}" for number in range(1, KEEP + 1))]
    assert all(path.stat().st_size <= 1000 for path in (tmp_path / "logs").iterdir())
    numbers = [int(line.target.removeprefix("key-")) for line in entries(tmp_path)]
    assert numbers == list(range(numbers[0], 100))


def test_processes_that_write_and_rotate_at_once_lose_no_line(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from gateway.access.audit_log import Audit, entry\n"
        "audit = Audit(Path(sys.argv[1]), max_bytes=8000)\n"
        "for number in range(60): audit.record(entry('key.rotate', f'{sys.argv[2]}-{number}'))"
    )

    def write(name: str) -> None:
        subprocess.run([sys.executable, "-c", program, str(tmp_path), name], check=True, timeout=patient(120))

    with ThreadPoolExecutor(3) as writers:
        list(writers.map(write, "abc"))

    found = [line.target for line in entries(tmp_path)]
    assert sorted(found) == sorted(f"{name}-{number}" for name in "abc" for number in range(60))
    assert (tmp_path / "logs" / "audit.log.1").exists()


def test_a_line_after_half_a_line_begins_on_its_own(tmp_path: Path) -> None:
    Audit(tmp_path).record(entry("key.create", "a"))
    with audit_path(tmp_path).open("a") as file:
        file.write('{"time":"20')
    Audit(tmp_path).record(entry("key.create", "b"))

    lines = last_lines(audit_path(tmp_path), 10)
    assert [_decoder.decode(line).target for line in (lines[0], lines[2])] == ["a", "b"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can write in the homes of others")
@pytest.mark.parametrize("trap", ["folder", "file", "name"])
def test_root_follows_no_link_that_the_homes_owner_left(tmp_path: Path, trap: str) -> None:
    home, target = tmp_path / "home", tmp_path / "elsewhere"
    home.mkdir()
    target.mkdir()
    (target / "audit.log").write_text("secret\n")
    os.chown(home, 65534, 65534)
    if trap == "folder":
        (home / "logs").symlink_to(target)
    else:
        (home / "logs").mkdir()
        make = os.symlink if trap == "file" else os.link
        make(target / "audit.log", home / "logs" / "audit.log")

    with pytest.raises(AuditUnwritable, match=r"audit.log|symbolic link|another name"):
        Audit(home).record(entry("key.create", "a"))
    assert (target / "audit.log").read_text() == "secret\n"
    assert target.stat().st_uid == (target / "audit.log").stat().st_uid == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can write in the homes of others")
def test_what_root_makes_in_the_home_of_a_service_belongs_to_its_user(tmp_path: Path) -> None:
    os.chown(tmp_path, 65534, 65534)
    Audit(tmp_path).record(entry("key.create", "a"))

    assert (tmp_path / "logs").stat().st_uid == 65534
    assert audit_path(tmp_path).stat().st_uid == 65534
