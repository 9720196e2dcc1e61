"""What outlives a gateway: the epoch counter, and a state file for each running worker."""

import contextlib
import logging
import os
from pathlib import Path
from urllib.parse import quote

import msgspec
import psutil

from protocol.spec import WorkerSpec

log = logging.getLogger(__name__)

# Two readings of one process's creation time may differ by a clock tick.
CREATE_TIME_SLACK_S = 0.05


class Record(msgspec.Struct, frozen=True):
    """A running worker: enough to know it again, and to know whether it is what the configuration wants."""

    pid: int
    epoch: int
    spec: WorkerSpec
    create_time: float
    argv: list[str]

    def is_alive(self) -> bool:
        """Whether this very process still runs: pids are used again, creation times and arguments are not."""
        try:
            process = psutil.Process(self.pid)
            return (
                process.status() != psutil.STATUS_ZOMBIE
                and abs(process.create_time() - self.create_time) < CREATE_TIME_SLACK_S
                and process.cmdline()[1:] == self.argv[1:]
            )
        except psutil.Error:
            return False


class Ledger:
    """The files below `run/` that name workers. Used by the holder of the run directory's lock only."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "workers"
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._counter = run_dir / "epoch"
        self._epoch = max(self._read_counter(), *(record.epoch for record in self._records()), 0)

    def next_epoch(self) -> int:
        """A number that no worker of this home ever had, also after a crash of the gateway."""
        self._epoch += 1
        _write(self._counter, str(self._epoch).encode())
        return self._epoch

    def add(self, record: Record) -> None:
        _write(self._file(record.spec.name), msgspec.json.encode(record))

    def remove(self, name: str) -> None:
        self._file(name).unlink(missing_ok=True)

    def survivors(self) -> list[Record]:
        """Workers of an earlier gateway that still run. Files of others are removed."""
        alive: list[Record] = []
        for record in self._records():
            if record.is_alive():
                alive.append(record)
            else:
                self.remove(record.spec.name)
        return alive

    def _records(self) -> list[Record]:
        records: list[Record] = []
        for path in sorted(self._folder.glob("*.json")):
            try:
                records.append(msgspec.json.decode(path.read_bytes(), type=Record))
            except (OSError, msgspec.DecodeError) as error:
                log.warning("removed an unreadable state file %s: %s", path, error)
                path.unlink(missing_ok=True)
        return records

    def _read_counter(self) -> int:
        with contextlib.suppress(OSError, ValueError):
            return int(self._counter.read_bytes())
        return 0

    def _file(self, name: str) -> Path:
        return self._folder / f"{quote(name, safe='')}.json"


def _write(path: Path, content: bytes) -> None:
    # Whole or not at all: the gateway may be killed at any instant.
    fresh = path.with_name(path.name + ".new")
    try:
        fresh.write_bytes(content)
        os.replace(fresh, path)
    except OSError as error:
        # A full disk must not stop the serving; what is lost is adoption after a crash of ours.
        log.error("cannot write %s: %s", path, error)
