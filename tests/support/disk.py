"""Waiting for the disk cache's threads, and looking at its folder."""

import time
from pathlib import Path

from tests.support.scale import patient
from worker.prefix_cache.disk import CacheDisk, DiskEntry, DiskRead

DEADLINE_S = 20


def written(disk: CacheDisk) -> None:
    """Until everything that was queued is on disk, or dropped."""
    end = time.monotonic() + patient(DEADLINE_S)
    while disk.queued_bytes:
        assert time.monotonic() < end, "the disk cache does not finish writing"
        time.sleep(0.001)


def read(disk: CacheDisk, entry: DiskEntry, *, with_state: bool = True) -> DiskRead:
    wish = disk.read(entry, with_state=with_state)
    end = time.monotonic() + patient(DEADLINE_S)
    while not wish.is_done:
        assert time.monotonic() < end, "the disk cache does not finish reading"
        time.sleep(0.001)
    return wish


def files(folder: Path) -> list[Path]:
    """The files of all models, quarantine left out."""
    return [path for path in folder.glob("*/*.safetensors") if path.parent.name != "quarantine"]


def size(folder: Path) -> int:
    """Bytes of everything in the folder, half written and quarantined files included. Files may vanish meanwhile."""
    # By inode: one that is renamed while the folder is being read shows up twice.
    sizes: dict[int, int] = {}
    for path in folder.glob("*/*"):
        try:
            facts = path.stat()
        except FileNotFoundError:
            continue
        sizes[facts.st_ino] = facts.st_size
    return sum(sizes.values())
