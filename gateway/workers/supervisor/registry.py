"""Registry of running workers: a state file for each, from which the next gateway adopts it, and the epoch counter.

A state file may be of another version of this program. All versions write the same fields for the process; the
specification is decoded strictly. A worker whose specification cannot be decoded is stopped and its model loaded
again, because the memory of every running worker must be counted.
"""

import contextlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Protocol
from urllib.parse import quote, unquote

import msgspec
import psutil
from msgspec import Meta, Struct

from gateway.workers.supervisor.os_process import start_ticks
from gateway.workers.supervisor.ports import WorkerPort
from protocol.spec import WorkerSpec

log = logging.getLogger(__name__)

_SUFFIX: Final = ".json"
_ENDED: Final = "it has ended"


class WorkerProcess(Struct, frozen=True, kw_only=True):
    """Identity of a worker's process. Its arguments contain its epoch, which is never reused."""

    pid: Annotated[int, Meta(gt=1, lt=2**31)]
    epoch: int
    argv: Annotated[list[str], Meta(min_length=2)]
    # Ticks from boot to the process's start; 0 if unknown.
    start_ticks: int = 0

    def mismatch(self) -> str:
        """Return why the pid is not this process; empty if this process still runs."""
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
        """Whether this process still runs and its pid was not reused."""
        return not self.mismatch()


class WorkerRecord(WorkerProcess, frozen=True, kw_only=True):
    """Content of a state file: the process, and its specification, which is compared with the configuration."""

    spec: WorkerSpec
    # The previous version of this program identifies a process by this field.
    create_time: float = 0.0
    # Processes of the group's other local ranks.
    ranks: list[WorkerProcess] = []


@dataclass(frozen=True, slots=True)
class Survivor:
    """Worker of an earlier gateway. If its specification cannot be decoded, `spec` is None and `problem` the reason."""

    name: str
    process: WorkerProcess
    spec: WorkerSpec | None
    problem: str = ""
    ranks: tuple[WorkerProcess, ...] = ()


class Registry:
    """State files and epoch counter in the run directory, whose lock must be held."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "workers"
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._counter = run_dir / "epoch"
        self._epoch = max(self._read_counter(), *(survivor.process.epoch for survivor in self._recorded()), 0)

    def next_epoch(self) -> int:
        """Return an epoch that no worker of this home ever had, even if an earlier gateway crashed."""
        self._epoch += 1
        _write(self._counter, str(self._epoch).encode())
        return self._epoch

    def add(self, record: WorkerRecord) -> None:
        _write(self._file(record.spec.name), msgspec.json.encode(record))

    def remove(self, name: str) -> None:
        # If the worker's name is too long for a file name, there is no file.
        with contextlib.suppress(OSError):
            self._file(name).unlink(missing_ok=True)

    def survivors(self, mismatch: Callable[[WorkerProcess], str] = WorkerProcess.mismatch) -> list[Survivor]:
        """Return workers of an earlier gateway that still run. Remove all other state files, and log the reasons."""
        alive: list[Survivor] = []
        for survivor in self._recorded():
            reason = mismatch(survivor.process)
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


class ProcessTable(Protocol):
    """Processes of workers on this machine; a simulation has a table of its own."""

    def spawn(self, spec: WorkerSpec) -> WorkerPort:
        """Start a worker and record it in the registry. Raises `OSError`."""
        ...

    def adopt(self, survivor: Survivor) -> WorkerPort: ...
    def mismatch(self, process: WorkerProcess) -> str:
        """Return why a pid is not this process; empty if this process still runs."""
        ...


def _decode(name: str, content: bytes) -> Survivor:
    """Decode a state file. Raises `msgspec.DecodeError` if it does not identify a process."""
    process = msgspec.json.decode(content, type=WorkerProcess)
    try:
        record = msgspec.json.decode(content, type=WorkerRecord)
        return Survivor(name, process, record.spec, ranks=tuple(record.ranks))
    except msgspec.DecodeError as error:
        return Survivor(name, process, None, str(error))


def _write(path: Path, content: bytes) -> None:
    """Write a file atomically. A full disk is only logged: the worker cannot be adopted later, but it must serve."""
    fresh = path.with_name(path.name + ".new")
    try:
        fresh.write_bytes(content)
        os.replace(fresh, path)
    except OSError as error:
        log.error("cannot write %s: %s", path, error)
