"""The disk cache's folder: shared, capped, private, and of no danger whatever becomes of its files."""

import errno
import logging
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import disk as folder
from tests.support.caches import KINDS, contents, filled, grow, layout
from tests.support.prefix_checks import check_cache
from tests.support.scale import patient, scaled
from worker.kv.spans_and_checkpoints import Span, arrays_of
from worker.prefix_cache.cache_and_eviction import PrefixCache
from worker.prefix_cache.disk import CacheDisk, DiskEntry, FileStatus
from worker.prefix_cache.radix_tree import Tokens, salt_key

PLENTY = 1 << 30


def ids(tokens: Sequence[int]) -> Tokens:
    return np.array(tokens, dtype=np.int32)


def span(kilobytes: int) -> Span:
    made = [(mx.ones((1, 1, kilobytes, 128)), mx.ones((1, 1, kilobytes, 128)))]
    mx.eval(arrays_of(made, []))
    return made


def write(disk: CacheDisk, number: int, kilobytes: int = 10, parent: DiskEntry | None = None) -> DiskEntry:
    """A file of about this size."""
    begin = parent.begin + len(parent.tokens) if parent else 0
    entry = disk.entry(parent, salt_key(""), begin, ids([number] * kilobytes), True, False)
    disk.write(entry, span(kilobytes // 2), None)
    folder.written(disk)
    return entry


def started(root: Path, cap: int = PLENTY, key: str = "model") -> CacheDisk:
    disk = CacheDisk(root, key, cap)
    disk.start()
    return disk


def restarted(root: Path, key: str = "model") -> list[DiskEntry]:
    disk = CacheDisk(root, key, PLENTY)
    entries = disk.start()
    disk.close()
    return entries


# -- the folder ------------------------------------------------------------------------------------------------------


def test_what_was_written_is_found_again_parents_first(tmp_path: Path) -> None:
    disk = started(tmp_path)
    first = write(disk, 1)
    second = write(disk, 2, parent=first)
    write(disk, 3, parent=second)
    write(disk, 4)
    disk.close()
    entries = restarted(tmp_path)
    assert len(entries) == 4
    for at, entry in enumerate(entries):
        assert entry.status is FileStatus.WRITTEN
        assert entry.parent is None or entry.parent in entries[:at]
    assert {int(entry.tokens[0]) for entry in entries} == {1, 2, 3, 4}


def test_only_the_owner_may_read_it(tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o755)
    disk = started(tmp_path)
    write(disk, 1)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in [tmp_path, *tmp_path.rglob("*")]}
    assert all(mode == (0o700 if path.is_dir() else 0o600) for path, mode in modes.items()), modes
    assert len(modes) == 4, "the folder, the model's folder, the file, the ledger"


def test_another_models_files_are_not_looked_at(tmp_path: Path) -> None:
    write(started(tmp_path, key="one"), 1)
    assert restarted(tmp_path, key="other") == []
    assert len(folder.files(tmp_path)) == 1


def test_files_without_their_parent_are_deleted_at_the_start(tmp_path: Path) -> None:
    disk = started(tmp_path)
    first = write(disk, 1)
    second = write(disk, 2, parent=first)
    write(disk, 3, parent=second)
    (tmp_path / "model" / f"{first.key}.safetensors").unlink()
    assert restarted(tmp_path) == []
    assert folder.files(tmp_path) == []


def test_the_cap_is_kept_and_the_longest_unused_goes_first(tmp_path: Path) -> None:
    disk = started(tmp_path, cap=100_000)
    entries = [write(disk, number) for number in range(20)]
    assert folder.size(tmp_path) <= 100_000
    alive = [entry.status is FileStatus.WRITTEN for entry in entries]
    assert any(alive)
    assert alive == sorted(alive), "the newest are left"
    folder.read(disk, entries[alive.index(True)])
    write(disk, 50)
    write(disk, 51)
    used, next_oldest = entries[alive.index(True)], entries[alive.index(True) + 1]
    assert used.is_readable
    assert not next_oldest.is_readable
    assert folder.size(tmp_path) <= 100_000
    assert (disk.counts.disk_files, disk.counts.disk_bytes) == (len(folder.files(tmp_path)), folder.size(tmp_path))


def test_a_path_goes_from_its_end_so_that_no_file_is_left_without_its_parent(tmp_path: Path) -> None:
    disk = started(tmp_path, cap=60_000)
    chain: list[DiskEntry] = []
    for number in range(8):
        chain.append(write(disk, number, parent=chain[-1] if chain else None))
    for number in range(100, 106):
        write(disk, number)
        alive = [entry.is_readable for entry in chain]
        assert alive == sorted(alive, reverse=True)
    assert not all(entry.is_readable for entry in chain)
    assert len(restarted(tmp_path)) == len(folder.files(tmp_path))


def test_a_file_larger_than_the_cap_is_not_begun(tmp_path: Path) -> None:
    disk = started(tmp_path, cap=50_000)
    kept = write(disk, 1)
    assert write(disk, 2, kilobytes=200).status is FileStatus.LOST
    assert kept.is_readable
    assert disk.counts.disk_dropped == 1


def test_several_workers_share_the_cap(tmp_path: Path) -> None:
    disks = [started(tmp_path, cap=200_000, key=key) for key in ("one", "two", "three")]
    rng = random.Random(3)
    for number in range(60):
        disk = disks[number % 3]
        entry = disk.entry(None, salt_key(""), 0, ids([number] * 10), True, False)
        disk.write(entry, span(rng.randrange(2, 20)), None)
        assert folder.size(tmp_path) <= 200_000
    for disk in disks:
        folder.written(disk)
    assert 100_000 < folder.size(tmp_path) <= 200_000
    assert sum(disk.counts.disk_writes for disk in disks) == 60


def test_what_waits_to_be_written_is_bounded(tmp_path: Path) -> None:
    disk = CacheDisk(tmp_path, "model", PLENTY, queue_bytes=30_000)  # not started: nothing leaves the queue
    entries = [disk.entry(None, "", 0, ids([number]), True, False) for number in range(4)]
    for entry in entries:
        disk.write(entry, span(10), None)
    assert [entry.status for entry in entries] == [
        FileStatus.PENDING,
        FileStatus.PENDING,
        FileStatus.LOST,
        FileStatus.LOST,
    ]
    assert disk.counts.disk_dropped == 2


def test_a_folder_that_cannot_be_written_is_survived_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    disk = started(blocked)
    with caplog.at_level(logging.WARNING, "mlxd.worker"):
        entries = [write(disk, number) for number in range(5)]
    assert all(entry.status is FileStatus.LOST for entry in entries)
    assert disk.counts.disk_dropped == 5
    assert len(caplog.records) == 1
    blocked.unlink()
    assert write(disk, 9).is_readable, "it goes on when the disk is well again"


def test_a_full_disk_is_survived_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    script = f"""
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from pathlib import Path
from tests.worker.prefix_cache.test_disk import started, write
disk = started(Path({str(tmp_path)!r}))
assert write(disk, 1).is_readable
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
assert not write(disk, 2).is_live
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert write(disk, 3).is_readable
assert (disk.counts.disk_writes, disk.counts.disk_dropped) == (2, 1)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=patient(60))
    assert len(restarted(tmp_path)) == 2
    assert not list(tmp_path.glob("*/*.part"))


def test_clearing_the_folder_under_a_running_worker_is_survived(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    disk = started(root)
    entry = write(disk, 1)
    shutil.rmtree(root)
    assert folder.read(disk, entry).span is None
    assert entry.status is FileStatus.LOST
    assert disk.counts.disk_quarantined == 0, "a file that is gone is not a bad one"
    assert write(disk, 2).is_readable
    assert (disk.counts.disk_files, disk.counts.disk_bytes) == (1, folder.size(root))


def test_bad_files_are_set_aside_with_a_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk = started(tmp_path)
    entries = [write(disk, number) for number in range(3)]
    paths = [tmp_path / "model" / f"{entry.key}.safetensors" for entry in entries]
    content = bytearray(paths[0].read_bytes())
    content[-100] ^= 4
    paths[0].write_bytes(content)
    os.truncate(paths[1], 100)
    with caplog.at_level(logging.WARNING, "mlxd.worker"):
        assert folder.read(disk, entries[0]).span is None
        after = CacheDisk(tmp_path, "model", PLENTY)
        found = after.start()
    assert [int(entry.tokens[0]) for entry in found] == [2]
    assert [disk.counts.disk_quarantined, after.counts.disk_quarantined] == [1, 1]
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["disk cache"] * 2
    assert {path.name for path in (tmp_path / "quarantine").iterdir()} == {f"model.{path.name}" for path in paths[:2]}


def test_a_file_that_fails_in_reading_and_in_looking_for_it_does_not_end_the_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = started(tmp_path)
    bad, good = write(disk, 1), write(disk, 2)

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "the device has failed")

    with monkeypatch.context() as patched:
        patched.setattr("worker.prefix_cache.disk.load", fail)
        patched.setattr(Path, "exists", fail)
        assert folder.read(disk, bad).span is None
    assert folder.read(disk, good).span is not None


def test_a_read_that_nobody_will_do_is_done_at_once_with_nothing(tmp_path: Path) -> None:
    disk = started(tmp_path)
    entry = write(disk, 1)
    disk.close(patient(folder.DEADLINE_S))
    read = disk.read(entry, with_state=True)
    assert read.is_done
    assert read.span is None


@pytest.mark.soak
def test_a_writer_killed_at_any_moment_leaves_only_whole_files(tmp_path: Path) -> None:
    script = f"""
from pathlib import Path
from tests.worker.prefix_cache.test_disk import started, write
disk = started(Path({str(tmp_path)!r}), cap=3_000_000)
parent = None
for number in range(100_000):
    entry = write(disk, number, kilobytes=200, parent=parent)
    parent = None if number % 7 == 0 else entry
"""
    for delay_s in scaled((0.0, 0.013, 0.029), (0.013,)):
        before = len(folder.files(tmp_path))
        writer = subprocess.Popen([sys.executable, "-c", script])
        end = time.monotonic() + patient(folder.DEADLINE_S)
        while len(folder.files(tmp_path)) <= before and time.monotonic() < end:
            time.sleep(0.001)
        time.sleep(delay_s)  # not a wait for anything: it chooses the moment
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        for path in folder.files(tmp_path):
            path.touch()  # the next writer's own are the newest, so that some of these stay
        disk = CacheDisk(tmp_path, "model", 3_000_000)
        entries = disk.start()
        assert entries
        assert disk.counts.disk_quarantined == 0
        assert all(folder.read(disk, entry).span is not None for entry in entries)
        disk.close()
        shutil.rmtree(tmp_path / "model")
    disk = started(tmp_path, cap=20_000)
    write(disk, 1)
    write(disk, 2)
    assert not list(tmp_path.glob("*/*.part")), "the remains of the dead are removed when room is made"


# -- under the prefix cache ------------------------------------------------------------------------------------------

# Parts of a prompt, long enough that a part is worth a read.
part = st.tuples(st.integers(0, 2), st.integers(60, 80))
prompts = st.lists(part, min_size=1, max_size=4).map(
    lambda parts: [token for token, count in parts for _ in range(count)]
)
actions = st.sampled_from(["store", "fetch", "fetch", "forget", "restart", "lose"])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=scaled(40, 16), deadline=None)
@given(steps=st.lists(st.tuples(actions, st.sampled_from(["", "a"]), prompts), max_size=25), seed=st.integers(0, 99))
def test_memory_and_disk_together_find_what_was_stored(
    kind: str, steps: list[tuple[str, str, list[int]]], seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("cache")
    rng = random.Random(seed)
    cache = PrefixCache(layout(kind), PLENTY, disk=CacheDisk(root, "model", PLENTY))
    known: dict[str, list[list[int]]] = {"": [], "a": []}
    has_lost = False
    for action, salt, tokens in steps:
        assert cache.disk is not None
        match action:
            case "store":
                cache.store(ids(tokens), filled(kind, tokens), salt)
                cache.persist(ids(tokens), {len(tokens)}, salt)
                cache.flush()
                folder.written(cache.disk)
                known[salt].append(tokens)
            case "forget":
                cache.clear()
            case "restart":
                cache.close()
                cache = PrefixCache(layout(kind), PLENTY, disk=CacheDisk(root, "model", PLENTY))
            case "lose" if paths := folder.files(root):
                rng.choice(paths).unlink()
                has_lost = True
            case _:
                reused = fetch(cache, kind, tokens, salt)
                shared = [common(other, tokens) for other in known[salt]]
                if cache.needs_checkpoints:
                    shared = [size for size, other in zip(shared, known[salt], strict=True) if size == len(other)]
                best = max(shared, default=0)
                # An end of less than 64 tokens is not written yet, and to gain less than 64 nothing is read.
                assert reused <= best
                assert has_lost or cache.needs_checkpoints or reused > best - 128
        check_cache(cache)
    cache.close()


@pytest.mark.parametrize("kind", ["sliding", "two windows"])
def test_a_checkpoint_inside_of_a_longer_files_edge_is_written_with_its_windows(tmp_path: Path, kind: str) -> None:
    disk = CacheDisk(tmp_path, "model", PLENTY)
    cache = PrefixCache(layout(kind), PLENTY, disk=disk, disk_min_tokens=1)
    whole = list(range(1, 201))
    # The edge that is on disk has the windows of its end only, and memory has nothing of it.
    for end in (200, 198):
        cache.store(ids(whole[:end]), filled(kind, whole[:end]))
        cache.persist(ids(whole[:end]), {end})
        cache.flush()
        folder.written(disk)
        cache.clear()

    assert fetch(cache, kind, whole[:198], "") == 198
    check_cache(cache)
    cache.close()


@pytest.mark.parametrize("kind", ["sliding", "two windows"])
def test_a_checkpoint_on_disk_brings_the_windows_that_its_edge_in_memory_lacks(tmp_path: Path, kind: str) -> None:
    disk = CacheDisk(tmp_path, "model", PLENTY)
    cache = PrefixCache(layout(kind), PLENTY, disk=disk, disk_min_tokens=1)
    whole = list(range(1, 201))
    cache.store(ids(whole[:100]), filled(kind, whole[:100]))
    cache.persist(ids(whole[:100]), {100})
    cache.flush()
    folder.written(disk)
    cache.clear()
    # In memory the first 100 tokens have the windows of the 200th token only.
    longer = filled(kind, whole[:199])
    grow(longer, whole[:199], whole[199:])
    cache.store(ids(whole), longer)

    assert fetch(cache, kind, whole[:100], "") == 100
    check_cache(cache)
    cache.close()


def fetch(cache: PrefixCache, kind: str, tokens: list[int], salt: str) -> int:
    """As a row does: ask for what the disk has, wait, take; and check what was taken."""
    ticket = cache.restore(ids(tokens), salt)
    end = time.monotonic() + patient(folder.DEADLINE_S)
    while ticket is not None and not ticket.is_done:
        assert time.monotonic() < end
        time.sleep(0.001)
    reused, caches = cache.fetch(ids(tokens), salt, ticket)
    assert contents(caches) == (contents(filled(kind, tokens[:reused])) if reused else [])
    return reused


def common(left: Sequence[int], right: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def test_a_budget_for_memory_smaller_than_a_prompt_does_not_keep_the_disk_from_giving_it(tmp_path: Path) -> None:
    scale = PrefixCache(layout("plain"), PLENTY)
    scale.store(ids(range(300)), filled("plain", range(300)))
    cache = PrefixCache(layout("plain"), scale.nbytes * 2 // 3, disk=CacheDisk(tmp_path, "model", PLENTY))
    assert cache.disk is not None
    for end in range(100, 301, 100):
        cache.store(ids(range(end)), filled("plain", range(end)))
        cache.persist(ids(range(end)), (), "")
        cache.flush()
        folder.written(cache.disk)
        check_cache(cache)
    assert cache.longest(ids(range(300))) < 300
    assert fetch(cache, "plain", list(range(300)), "") >= 200
    check_cache(cache)


@pytest.mark.parametrize("kind", ["recurrent", "sliding", "two windows"])
def test_a_checkpoint_that_came_after_its_edge_gets_a_file_of_its_own(kind: str, tmp_path: Path) -> None:
    cache = PrefixCache(layout(kind), PLENTY, disk=CacheDisk(tmp_path, "model", PLENTY))
    assert cache.disk is not None
    for end in (200, 100):
        cache.store(ids(range(end)), filled(kind, range(end)))
        cache.persist(ids(range(end)), {end}, "")
        cache.flush()
        folder.written(cache.disk)
    assert len(folder.files(tmp_path)) == 2
    cache.close()
    cache = PrefixCache(layout(kind), PLENTY, disk=CacheDisk(tmp_path, "model", PLENTY))
    assert fetch(cache, kind, [*range(100), *[7] * 50], "") == 100
    assert fetch(cache, kind, list(range(200)), "") == 200
    check_cache(cache)


def test_short_ends_are_written_when_there_is_more(tmp_path: Path) -> None:
    disk = CacheDisk(tmp_path, "model", PLENTY)
    cache = PrefixCache(layout("plain"), PLENTY, disk=disk)
    counts: list[int] = []
    for end in (100, 120, 150, 170, 220):
        cache.store(ids(range(end)), filled("plain", range(end)))
        cache.persist(ids(range(end)), (), "")
        cache.flush()
        folder.written(disk)
        counts.append(len(folder.files(tmp_path)))
    assert counts == [1, 1, 1, 4, 4]
    cache.close()
    cache = PrefixCache(layout("plain"), PLENTY, disk=CacheDisk(tmp_path, "model", PLENTY))
    assert fetch(cache, "plain", list(range(220)), "") == 170


def test_chains_of_files_are_linked_inside_of_an_edge(tmp_path: Path) -> None:
    """The second prompt leaves the first in the middle of what is one file."""
    cache = PrefixCache(layout("plain"), PLENTY, disk=CacheDisk(tmp_path, "model", PLENTY))
    assert cache.disk is not None
    first, second = list(range(200)), [*range(120), *range(1000, 1100)]
    for tokens in (first, second):
        cache.store(ids(tokens), filled("plain", tokens))
        cache.persist(ids(tokens), (), "")
        cache.flush()
        folder.written(cache.disk)
    assert len(folder.files(tmp_path)) == 2, "what they share is written once"
    cache.close()
    cache = PrefixCache(layout("plain"), PLENTY, disk=CacheDisk(tmp_path, "model", PLENTY))
    assert fetch(cache, "plain", second, "") == len(second)
    assert fetch(cache, "plain", first, "") == len(first)
    check_cache(cache)


@pytest.mark.soak
def test_nodes_whose_files_were_deleted_are_forgotten(tmp_path: Path) -> None:
    disk = CacheDisk(tmp_path, "model", 400_000)
    cache = PrefixCache(layout("plain"), PLENTY, disk=disk)
    known: list[int] = []
    for number in range(700):
        tokens = [number] * 64
        cache.store(ids(tokens), filled("plain", tokens))
        cache.persist(ids(tokens), (), "")
        cache.clear()
        cache.flush()
        folder.written(disk)
        known.append(sum(1 for _ in cache._tree._nodes()))
    assert disk.lost > 300
    assert max(known) < 450
    check_cache(cache)
