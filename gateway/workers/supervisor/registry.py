"""Registry of running workers: a state file for each, by which the next gateway adopts them, and the epoch counter.

State files may be another version's. Each begins with what all versions write and read alike, the worker's process;
the specification behind it is decoded strictly. A worker whose specification is not understood is stopped and loaded
again: it is in no case left running without its memory being counted.
"""

import contextlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import quote, unquote

import msgspec
import psutil
from msgspec import Meta, Struct

from gateway.workers.supervisor.os_process import start_ticks
from protocol.spec import WorkerSpec

log = logging.getLogger(__name__)

_SUFFIX: Final = ".json"
_ENDED: Final = "it has ended"


class WorkerProcess(Struct, frozen=True, kw_only=True):
    """A worker's process, enough to know it again. Its arguments name its epoch, which no other worker ever has."""

    pid: Annotated[int, Meta(gt=1, lt=2**31)]
    epoch: int
    argv: Annotated[list[str], Meta(min_length=2)]
    # Since the boot: a step of the system's clock changes nothing. 0 where it was not written or cannot be told.
    start_ticks: int = 0

    def mismatch(self) -> str:
        """The reason why the pid is not this process; empty when it runs."""
        try:
            process = psutil.Process(self.pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                return _ENDED
            argv = process.cmdline()
        except psutil.NoSuchProcess:
            return _ENDED
        except psutil.Error as error:
            return f"it cannot be looked at ({error})"
        if argv[1:] != self.argv[1:]:
            return "its pid is another process's"
        if self.start_ticks and start_ticks(self.pid) not in (0, self.start_ticks):
            return "its pid is another process's, which started later"
        return ""

    def is_alive(self) -> bool:
        """Whether this very process still runs: pids are used again, arguments with an epoch are not."""
        return not self.mismatch()


class WorkerRecord(WorkerProcess, frozen=True, kw_only=True):
    """A state file: the process, and the specification that tells whether it is what the configuration wants."""

    spec: WorkerSpec
    # Read by the version before, which knew a process by it.
    create_time: float = 0.0
    # Of a group, the other ranks that run here.
    ranks: list[WorkerProcess] = []


@dataclass(frozen=True, slots=True)
class Survivor:
    """A worker of an earlier gateway. `spec` is None when another version wrote what is not understood here."""

    name: str
    process: WorkerProcess
    spec: WorkerSpec | None
    problem: str = ""
    ranks: tuple[WorkerProcess, ...] = ()


class Registry:
    """State files and epoch counter below `run/`. Used by the holder of the run directory's lock only."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "workers"
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._counter = run_dir / "epoch"
        self._epoch = max(self._read_counter(), *(survivor.process.epoch for survivor in self._recorded()), 0)

    def next_epoch(self) -> int:
        """A number that no worker of this home ever had, also after a crash of the gateway."""
        self._epoch += 1
        _write(self._counter, str(self._epoch).encode())
        return self._epoch

    def add(self, record: WorkerRecord) -> None:
        _write(self._file(record.spec.name), msgspec.json.encode(record))

    def remove(self, name: str) -> None:
        # A name that is too long for a file has none: see `_write`.
        with contextlib.suppress(OSError):
            self._file(name).unlink(missing_ok=True)

    def survivors(self) -> list[Survivor]:
        """Workers of an earlier gateway that still run. Files of others are removed, with the reason in the log."""
        alive: list[Survivor] = []
        for survivor in self._recorded():
            reason = survivor.process.mismatch()
            if not reason:
                alive.append(survivor)
                continue
            level = logging.INFO if reason == _ENDED else logging.WARNING
            process = survivor.process
            log.log(
                level, "worker %s#%d (pid %d) is not adopted: %s", survivor.name, process.epoch, process.pid, reason
            )
            self.remove(survivor.name)
        return alive

    def _recorded(self) -> list[Survivor]:
        recorded: list[Survivor] = []
        for path in sorted(self._folder.glob(f"*{_SUFFIX}")):
            try:
                recorded.append(_decode(unquote(path.name.removesuffix(_SUFFIX)), path.read_bytes()))
            except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
                log.error(
                    "removed a state file that cannot be read, %s: %s; if its worker runs, it ends after five minutes "
                    "without a gateway, and its memory is not counted until then",
                    path,
                    error,
                )
                path.unlink(missing_ok=True)
        return recorded

    def _read_counter(self) -> int:
        with contextlib.suppress(OSError, ValueError):
            return int(self._counter.read_bytes())
        return 0

    def _file(self, name: str) -> Path:
        return self._folder / f"{quote(name, safe='')}{_SUFFIX}"


def _decode(name: str, content: bytes) -> Survivor:
    """Raises `msgspec.DecodeError` for what does not even name a process."""
    process = msgspec.json.decode(content, type=WorkerProcess)
    try:
        record = msgspec.json.decode(content, type=WorkerRecord)
        return Survivor(name, process, record.spec, ranks=tuple(record.ranks))
    except msgspec.DecodeError as error:
        return Survivor(name, process, None, str(error))


def _write(path: Path, content: bytes) -> None:
    # Whole or not at all: the gateway may be killed at any instant.
    fresh = path.with_name(path.name + ".new")
    try:
        fresh.write_bytes(content)
        os.replace(fresh, path)
    except OSError as error:
        # A full disk must not stop the serving; what is lost is adoption after a crash of ours.
        log.error("cannot write %s: %s", path, error)
