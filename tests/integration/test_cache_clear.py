"""`mlxctl cache` against the worker's own writer."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np

from gateway.model_files import prefix_files
from tests.support import disk as folder
from tests.support.ctl import ctl
from worker.prefix_cache.disk import CacheDisk, DiskEntry, FileStatus
from worker.prefix_cache.fingerprint import LABEL
from worker.prefix_cache.salts import salt_key

CAP = 100_000
CONFIG = '[models.coder]\npath = "org/coder"\naliases = ["c"]\n[models.other]\n'


def write(disk: CacheDisk, number: int) -> DiskEntry:
    """A file of about 10 kB."""
    array = mx.ones((1, 1, 10, 128))
    mx.eval(array)
    entry = disk.entry(None, salt_key(""), 0, np.array([number] * 10, dtype=np.int32), True, False)
    disk.write(entry, [(array, array)], None)
    folder.written(disk)
    return entry


def started(root: Path, key: str, model: str) -> CacheDisk:
    disk = CacheDisk(root, key, CAP)
    disk.start()
    (root / key).mkdir(mode=0o700, parents=True)
    (root / key / LABEL).write_text(model + "\n")
    return disk


def test_the_gateway_knows_the_workers_layout() -> None:
    assert prefix_files.LABEL == LABEL


def test_a_model_is_cleared_under_a_running_worker_which_then_fills_the_whole_cap_again(tmp_path: Path) -> None:
    (tmp_path / "mlxd.toml").write_text(CONFIG)
    root = tmp_path / "cache" / "prefix"
    coder, other = started(root, "k1", "org/coder"), started(root, "k2", "other")
    entries = [write(coder, number) for number in range(5)] + [write(other, 1)]
    assert all(entry.status is FileStatus.WRITTEN for entry in entries)

    shown = json.loads(ctl(tmp_path, "cache", "stats", "--json").stdout)
    assert [(model["model"], model["files"]) for model in shown["models"]] == [("org/coder", 5), ("other", 1)]

    done = ctl(tmp_path, "cache", "clear", "c", "--json")
    assert json.loads(done.stdout)["files"] == 5
    assert [path.parent.name for path in folder.files(root)] == ["k2"]

    # The ledger no longer counts what is gone: what fits by its true size is kept.
    entries = [write(coder, number) for number in range(10, 15)]
    assert all(entry.status is FileStatus.WRITTEN for entry in entries)
    assert len(folder.files(root)) == 6
    assert folder.size(root) <= CAP
    assert int((root / ".total").read_text()) == sum(path.stat().st_size for path in folder.files(root))

    assert ctl(tmp_path, "cache", "clear").stdout.startswith("deleted 6 files")
    assert folder.files(root) == []
    coder.close()
    other.close()


def test_an_unknown_model_is_refused_and_no_cache_is_nothing_to_delete(tmp_path: Path) -> None:
    (tmp_path / "mlxd.toml").write_text(CONFIG)

    done = ctl(tmp_path, "cache", "clear", "nope")
    assert done.returncode == 1
    assert "nope" in done.stderr
    assert ctl(tmp_path, "cache", "clear").stdout == "deleted 0 files, 0 B\n"
    assert "0 B of 10.0 GiB" in ctl(tmp_path, "cache", "stats").stdout
