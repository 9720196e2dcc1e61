import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from gateway.pool.leftovers import Ledger, Record
from protocol.spec import WorkerSpec

ARGV = [sys.executable, "-c", "import time; time.sleep(60)", "org/model"]


def spec(name: str = "org/model", epoch: int = 4) -> WorkerSpec:
    return WorkerSpec(name=name, path="p", epoch=epoch, down="d", up="u")


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(ARGV) as process:
        yield process
        process.kill()


def record(process: subprocess.Popen[bytes]) -> Record:
    return Record(process.pid, 4, spec(), psutil.Process(process.pid).create_time(), ARGV)


def test_epochs_go_on_where_an_earlier_gateway_left_them(tmp_path: Path) -> None:
    assert [Ledger(tmp_path).next_epoch() for _ in range(3)] == [1, 2, 3]


def test_epochs_survive_a_broken_counter_by_the_workers_that_run(
    tmp_path: Path, process: subprocess.Popen[bytes]
) -> None:
    Ledger(tmp_path).add(record(process))
    (tmp_path / "epoch").write_text("not a number")
    assert Ledger(tmp_path).next_epoch() == 5


def test_a_running_worker_is_found_again_whatever_its_name(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    Ledger(tmp_path).add(record(process))
    assert Ledger(tmp_path).survivors() == [record(process)]
    Ledger(tmp_path).remove("org/model")
    assert Ledger(tmp_path).survivors() == []


def test_another_process_under_a_used_pid_is_not_a_worker(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    ours = record(process)
    older = Record(ours.pid, ours.epoch, ours.spec, ours.create_time - 10, ours.argv)
    stranger = Record(ours.pid, ours.epoch, ours.spec, ours.create_time, ["worker", "org/model"])
    assert ours.is_alive()
    assert not older.is_alive()
    assert not stranger.is_alive()


def test_the_file_of_a_dead_worker_and_an_unreadable_one_are_removed(
    tmp_path: Path, process: subprocess.Popen[bytes]
) -> None:
    Ledger(tmp_path).add(record(process))
    (tmp_path / "workers" / "broken.json").write_text("{")
    process.kill()
    process.wait()
    assert Ledger(tmp_path).survivors() == []
    assert os.listdir(tmp_path / "workers") == []
