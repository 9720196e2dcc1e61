"""`mlxctl cache` against the worker's own writer."""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from gateway.config.settings import CacheConfig, Config, ModelConfig, ServerConfig
from gateway.model_files import prefix_files
from gateway.reload import limit_prefixes
from tests.support import disk as folder
from tests.support.ctl import ctl
from worker.prefix_cache.disk import CacheDisk, DiskEntry, FileStatus
from worker.prefix_cache.fingerprint import LABEL
from worker.prefix_cache.radix_tree import salt_key

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


def test_a_limit_is_applied_to_what_is_there_and_the_longest_unused_goes_first(tmp_path: Path) -> None:
    root = tmp_path / "cache" / "prefix"
    coder, other = started(root, "k1", "org/coder"), started(root, "k2", "other")
    entries = [write(disk, number) for number in range(3) for disk in (coder, other)]
    coder.close()
    other.close()
    size = folder.size(root) // len(entries)
    quarantine = root / prefix_files.QUARANTINE
    quarantine.mkdir()
    (quarantine / f"k1.x{prefix_files.SUFFIX}").write_bytes(bytes(size))

    assert prefix_files.limit(root, CAP).files == 0
    assert prefix_files.limit(root, 4 * size).files == 3
    assert not list(quarantine.iterdir()), "quarantined files go first"
    left = {path.name.removesuffix(prefix_files.SUFFIX) for path in folder.files(root)}
    assert left == {entry.key for entry in entries[2:]}
    assert prefix_files.limit(root, size // 2).files == 4, "also if each file is larger than the limit"
    assert prefix_files.limit(root, 0).files == 0
    assert prefix_files.limit(tmp_path / "none", 0).files == 0


@pytest.mark.anyio
async def test_a_lowered_or_absent_limit_of_the_configuration_holds(tmp_path: Path) -> None:
    def config(*limits_bytes: int) -> Config:
        models = (ModelConfig(name=f"m{n}", path="p", cache=CacheConfig(disk_bytes=n)) for n in limits_bytes)
        return Config(tmp_path, ServerConfig(), {model.name: model for model in models}, tmp_path / "mlxd.toml")

    root = tmp_path / "cache" / "prefix"
    disk = started(root, "k1", "org/coder")
    for number in range(3):
        write(disk, number)
    size = folder.size(root) // 3
    await limit_prefixes(config(CAP))
    assert len(folder.files(root)) == 3
    await limit_prefixes(config(0, 2 * size))
    assert len(folder.files(root)) == 2
    await limit_prefixes(config())
    assert len(folder.files(root)) == 2, "no models are no limit"
    await limit_prefixes(config(0))
    assert folder.files(root) == []


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
