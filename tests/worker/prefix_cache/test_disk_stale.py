"""Stale files of a model in another form are set aside; files of other models, and files in use, are left alone."""

import logging
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.model_files import prefix_files
from tests.support import disk as folder
from tests.support.scale import patient
from tests.worker.prefix_cache.test_disk import PLENTY, write
from worker.prefix_cache.disk import LABEL, QUARANTINE, CacheDisk, CacheFormat, FolderOwner

OLD = CacheFormat("libraries", "layout", "old weights", "configuration", "tokenizer")
OLDER = CacheFormat("libraries", "layout", "older weights", "configuration", "tokenizer")
NEW = CacheFormat("libraries", "layout", "new weights", "configuration", "tokenizer")


def started(
    root: Path, form: CacheFormat, name: str = "coder", cap: int = PLENTY, home: Path | None = None
) -> CacheDisk:
    """A worker's disk cache that has already looked for what is stale."""
    disk = CacheDisk(root, form.key, cap, claim=FolderOwner(name, str(home or root), "org/coder", form))
    disk.start()
    until(lambda: list((root / form.key).glob(".for.*")))
    return disk


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + patient(folder.DEADLINE_S)
    while not condition():
        assert time.monotonic() < end, "the deadline passed"
        time.sleep(0.001)


def ended(disk: CacheDisk) -> None:
    disk.close(patient(folder.DEADLINE_S))


def left(
    root: Path, form: CacheFormat, name: str = "coder", numbers: range = range(3), home: Path | None = None
) -> list[Path]:
    """Files that a worker wrote before it ended."""
    disk = started(root, form, name, home=home)
    for number in numbers:
        write(disk, number)
    ended(disk)
    return [root / form.key / path.name for path in folder.files(root) if path.parent.name == form.key]


def after(root: Path, form: CacheFormat, name: str = "coder", home: Path | None = None) -> int:
    """Number of files that a worker started in this form sets aside."""
    disk = started(root, form, name, home=home)
    ended(disk)
    return disk.counts.disk_quarantined


def set_aside(root: Path) -> set[str]:
    return {path.name for path in (root / QUARANTINE).glob("*")}


def test_stale_files_are_set_aside_and_counted_with_a_line_for_each_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = CacheFormat("other libraries", "layout", "old weights", "configuration", "tokenizer")
    live = started(tmp_path, OLD)
    first = [tmp_path / OLD.key / f"{write(live, number).key}.safetensors" for number in range(3)]
    second = left(tmp_path, other, numbers=range(2))
    ended(live)
    sizes = {path.parent.name: path.stat().st_size for path in (*first, *second)}

    with caplog.at_level(logging.WARNING, "mlxd.worker"):
        disk = CacheDisk(tmp_path, NEW.key, PLENTY, claim=FolderOwner("coder", str(tmp_path), "org/coder", NEW))
        assert disk.start() == []
        ended(disk)

    assert disk.counts.disk_quarantined == len(first) + len(second) == 5
    assert sorted(record.getMessage() for record in caplog.records) == sorted(
        f"disk cache: {count} stale file(s) of coder ({count * sizes[key]} bytes, {key[:12]}) "
        f"are not used and set aside: other {why} than now"
        for key, count, why in ((OLD.key, 3, "weights"), (other.key, 2, "libraries, weights"))
    )
    assert set_aside(tmp_path) == {f"{path.parent.name}.{path.name}" for path in (*first, *second)}
    assert folder.files(tmp_path) == []
    assert after(tmp_path, NEW) == 0, "once"


def test_what_is_set_aside_does_not_come_back_with_its_form(tmp_path: Path) -> None:
    left(tmp_path, OLD)
    assert after(tmp_path, NEW) == 3
    disk = CacheDisk(tmp_path, OLD.key, PLENTY, claim=FolderOwner("coder", str(tmp_path), "org/coder", OLD))
    assert disk.start() == []
    ended(disk)


def test_another_model_and_another_daemon_keep_their_files(tmp_path: Path) -> None:
    """Daemons share a folder through links, so that each has a path of its own to it."""
    root, home = tmp_path / "shared", tmp_path / "home"
    root.mkdir()
    home.symlink_to(root)
    other = CacheFormat("libraries", "layout", "other weights", "configuration", "tokenizer")
    names, daemons = left(root, OLD, name="other"), left(root, other, home=home)
    assert len(names) == len(daemons) == 3
    left(root, NEW)
    assert all(path.exists() for path in (*names, *daemons))
    assert not set_aside(root)
    assert after(home, NEW, home=home) == 3, "the other daemon has the new form as well"
    assert all(path.exists() for path in names)


def test_folders_that_do_not_say_whose_they_are_are_left_to_the_cap(tmp_path: Path) -> None:
    disk = CacheDisk(tmp_path, OLD.key, PLENTY)
    disk.start()
    write(disk, 1)
    ended(disk)
    (tmp_path / OLD.key / LABEL).write_text("org/coder\n")
    assert after(tmp_path, NEW) == 0
    assert len(folder.files(tmp_path)) == 1
    # One that is used again says it from then on.
    assert after(tmp_path, OLD) == 0
    assert after(tmp_path, NEW) == 1


def test_a_folder_of_two_models_is_stale_when_neither_has_its_form(tmp_path: Path) -> None:
    left(tmp_path, OLD, name="coder")
    left(tmp_path, OLD, name="chat")
    assert after(tmp_path, NEW, name="coder") == 0
    assert after(tmp_path, NEW, name="coder") == 0
    assert len(folder.files(tmp_path)) == 3
    assert after(tmp_path, NEW, name="chat") == 3


def test_a_folder_that_is_in_use_is_left_alone_until_its_worker_has_ended(tmp_path: Path) -> None:
    """As by the daemon of another container, with the same names, paths and folder."""
    live = started(tmp_path, OLD)
    entry = write(live, 1)
    assert after(tmp_path, NEW) == 0
    assert folder.read(live, entry).span is not None
    ended(live)
    assert after(tmp_path, NEW) == 1


def test_the_folder_of_a_killed_worker_is_not_in_use(tmp_path: Path) -> None:
    script = f"""
import time
from pathlib import Path
from tests.worker.prefix_cache.test_disk_stale import OLD, started, write
write(started(Path({str(tmp_path)!r}), OLD), 1)
print("written", flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"written\n"
        assert after(tmp_path, NEW) == 0, "it lives"
        worker.send_signal(signal.SIGKILL)
    assert after(tmp_path, NEW) == 1


def test_a_folder_that_was_deleted_says_again_whose_it_is(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    disk = started(root, OLD)
    write(disk, 1)
    shutil.rmtree(root)
    write(disk, 2)
    assert (root / OLD.key / LABEL).read_text() == "org/coder\n"
    assert after(root, NEW) == 0, "and that it is in use"
    ended(disk)
    assert after(root, NEW) == 1


def test_files_that_are_gone_by_the_time_of_their_turn_are_not_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A name that leads nowhere is to all but a listing a file that has just vanished."""
    paths = left(tmp_path, OLD)
    mark = next(paths[0].parent.glob(".for.*"))
    for path in (paths[0], mark):
        path.unlink()
        path.symlink_to(tmp_path / "nowhere")
    with caplog.at_level(logging.WARNING, "mlxd.worker"):
        assert after(tmp_path, NEW) == 2
    assert "2 stale file(s)" in caplog.text
    assert "cannot write" not in caplog.text


def test_files_that_vanish_while_they_are_set_aside_are_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    has_ended = threading.Event()
    cleared = 0

    def clear() -> None:
        nonlocal cleared
        while not has_ended.is_set():
            cleared += prefix_files.clear(tmp_path).files
            for path in tmp_path.glob(f"{OLD.key}/*.safetensors"):
                path.unlink(missing_ok=True)  # as `rm` does it, which asks for no lock
            shutil.rmtree(tmp_path / OLD.key, ignore_errors=True)

    left(tmp_path, OLD, numbers=range(30))
    shutil.copytree(tmp_path / OLD.key, tmp_path.with_suffix(".kept"))
    found = 0
    for _ in range(30):
        shutil.copytree(tmp_path.with_suffix(".kept"), tmp_path / OLD.key, dirs_exist_ok=True)
        has_ended.clear()
        clearing = threading.Thread(target=clear)
        with caplog.at_level(logging.WARNING, "mlxd.worker"):
            disk = CacheDisk(tmp_path, NEW.key, PLENTY, claim=FolderOwner("coder", str(tmp_path), "org/coder", NEW))
            disk.start()
            clearing.start()
            ended(disk)
        has_ended.set()
        clearing.join()
        found += disk.counts.disk_quarantined
        assert not list((tmp_path / OLD.key).glob("*.safetensors"))
    assert cleared
    told = [re.fullmatch(r"disk cache: (\d+) stale file\(s\) .*", record.getMessage()) for record in caplog.records]
    assert sum(int(line[1]) if line else PLENTY for line in told) == found


def test_the_cap_holds_with_what_is_set_aside_and_that_goes_first(tmp_path: Path) -> None:
    cap = 50_000  # of files of 5.6 kB
    others = left(tmp_path, OLD, name="other", numbers=range(2))
    assert len(left(tmp_path, OLDER, numbers=range(5))) == 5
    disk = started(tmp_path, NEW, cap=cap)
    sizes: list[int] = []
    for number in range(100, 105):
        write(disk, number)
        assert folder.size(tmp_path) <= cap
        sizes.append(len(set_aside(tmp_path)))
    assert disk.counts.disk_quarantined == 5
    assert sizes[0] == 5
    assert sizes[-1] < 5
    assert all(path.exists() for path in others), "older than what was set aside, but of use"
    for number in range(200, 220):
        write(disk, number)
        assert folder.size(tmp_path) <= cap
    assert not set_aside(tmp_path)
    ended(disk)
