import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from gateway.workers.supervisor.child import start_ticks
from gateway.workers.supervisor.registry import Registry, WorkerRecord
from gateway.workers.supervisor.spawn import AdoptedProcess
from protocol.spec import WorkerSpec
from tests.support.scale import patient

ARGV = [sys.executable, "-c", "import time; time.sleep(60)", "org/model", "--epoch", "4"]


def spec(name: str = "org/model", epoch: int = 4) -> WorkerSpec:
    return WorkerSpec(name=name, path="p", epoch=epoch, down="d", up="u")


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(ARGV) as process:
        # For a moment after its start a process has no arguments yet.
        end = time.monotonic() + patient(10)
        while not psutil.Process(process.pid).cmdline():
            assert time.monotonic() < end, "the process got no arguments"
        yield process
        process.kill()


def record(process: subprocess.Popen[bytes]) -> WorkerRecord:
    ticks, created = start_ticks(process.pid), psutil.Process(process.pid).create_time()
    return WorkerRecord(pid=process.pid, epoch=4, argv=ARGV, start_ticks=ticks, spec=spec(), create_time=created)


def rewrite(run_dir: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Make the state file another version's."""
    (path,) = (run_dir / "workers").glob("*.json")
    content = json.loads(path.read_bytes())
    edit(content)
    path.write_text(json.dumps(content))


def test_a_name_too_long_for_a_file_is_neither_written_nor_in_the_way(
    tmp_path: Path, process: subprocess.Popen[bytes]
) -> None:
    registry = Registry(tmp_path)
    name = "é" * 60
    registry.add(msgspec.structs.replace(record(process), spec=spec(name)))
    registry.remove(name)
    assert registry.survivors() == []


def test_epochs_go_on_where_an_earlier_gateway_left_them(tmp_path: Path) -> None:
    assert [Registry(tmp_path).next_epoch() for _ in range(3)] == [1, 2, 3]


def test_epochs_survive_a_broken_counter_by_the_workers_that_run(
    tmp_path: Path, process: subprocess.Popen[bytes]
) -> None:
    Registry(tmp_path).add(record(process))
    (tmp_path / "epoch").write_text("not a number")
    assert Registry(tmp_path).next_epoch() == 5


def test_a_running_worker_is_found_again_whatever_its_name(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    Registry(tmp_path).add(record(process))
    (survivor,) = Registry(tmp_path).survivors()
    assert (survivor.name, survivor.process.pid, survivor.spec) == ("org/model", process.pid, spec())
    Registry(tmp_path).remove("org/model")
    assert Registry(tmp_path).survivors() == []


def test_a_step_of_the_clock_changes_neither_who_a_worker_is_nor_that_it_can_be_signalled(
    tmp_path: Path, process: subprocess.Popen[bytes]
) -> None:
    # Linux tells creation times by a boot time that moves with the clock.
    stepped = msgspec.structs.replace(record(process), create_time=record(process).create_time + 3600)
    Registry(tmp_path).add(stepped)

    (survivor,) = Registry(tmp_path).survivors()
    AdoptedProcess(survivor.process, lambda: None).signal(signal.SIGTERM)

    assert process.wait(patient(10)) == -signal.SIGTERM


def test_another_process_under_a_used_pid_is_not_a_worker_and_is_left_alone(
    tmp_path: Path, process: subprocess.Popen[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    ours = record(process)
    assert ours.is_alive()
    for other, reason in (
        (msgspec.structs.replace(ours, start_ticks=ours.start_ticks - 1), "which started later"),
        (msgspec.structs.replace(ours, argv=["worker", "org/model"]), "another process's"),
    ):
        caplog.clear()
        assert not other.is_alive()
        AdoptedProcess(other, lambda: None).signal(signal.SIGKILL)
        Registry(tmp_path).add(other)
        assert Registry(tmp_path).survivors() == []
        assert reason in caplog.text
        assert f"org/model#4 (pid {process.pid}) is not adopted" in caplog.text
    assert process.poll() is None


@pytest.mark.parametrize(
    "edit",
    [
        lambda content: content.update(color="blue"),
        # As the version before wrote them.
        lambda content: content.pop("start_ticks"),
        lambda content: content.pop("create_time"),
    ],
)
def test_the_state_file_of_another_version_is_understood_as_far_as_it_can_be(
    tmp_path: Path, process: subprocess.Popen[bytes], edit: Callable[[dict[str, Any]], object]
) -> None:
    Registry(tmp_path).add(record(process))
    rewrite(tmp_path, edit)

    (survivor,) = Registry(tmp_path).survivors()
    assert survivor.spec == spec()
    assert survivor.process.is_alive()


@pytest.mark.parametrize(
    ("edit", "problem"),
    [
        (lambda content: content["spec"].update(color="blue"), "color"),
        (lambda content: content["spec"].pop("path"), "path"),
        (lambda content: content.pop("spec"), "spec"),
    ],
)
def test_a_worker_whose_specification_is_not_understood_is_still_known_by_its_process(
    tmp_path: Path, process: subprocess.Popen[bytes], edit: Callable[[dict[str, Any]], object], problem: str
) -> None:
    Registry(tmp_path).add(record(process))
    rewrite(tmp_path, edit)
    (tmp_path / "epoch").unlink(missing_ok=True)

    registry = Registry(tmp_path)
    (survivor,) = registry.survivors()
    assert (survivor.name, survivor.spec) == ("org/model", None)
    assert problem in survivor.reason
    assert registry.next_epoch() == 5
    AdoptedProcess(survivor.process, lambda: None).signal(signal.SIGTERM)
    assert process.wait(patient(10)) == -signal.SIGTERM


def test_the_version_before_reads_a_state_file_of_this_one(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    class SpecBefore(msgspec.Struct, forbid_unknown_fields=True):
        """The required fields, and one of the defaults that a version had."""

        name: str
        path: str
        epoch: int
        down: str
        up: str
        context: int = 0

    class RecordBefore(msgspec.Struct):
        pid: int
        epoch: int
        spec: SpecBefore
        create_time: float
        argv: list[str]

    ours = record(process)
    content = msgspec.json.encode(msgspec.structs.replace(ours, spec=msgspec.structs.replace(spec(), context=77)))
    before = msgspec.json.decode(content, type=RecordBefore)
    assert (before.pid, before.argv, before.create_time) == (ours.pid, ARGV, ours.create_time)
    assert before.spec.context == 77


def test_the_file_of_a_dead_worker_and_an_unreadable_one_are_removed_with_the_reason(
    tmp_path: Path, process: subprocess.Popen[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    Registry(tmp_path).add(record(process))
    (tmp_path / "workers" / "broken.json").write_text("{")
    (tmp_path / "workers" / "system.json").write_text('{"pid":1,"epoch":1,"argv":["a","b"]}')
    process.kill()
    process.wait()
    assert Registry(tmp_path).survivors() == []
    assert os.listdir(tmp_path / "workers") == []
    assert "is not adopted: it has ended" in caplog.text
    assert caplog.text.count("a state file that cannot be read") == 2
