"""Registry of running workers: a state file for each, from which the next gateway adopts it, and the epoch counter.

Another version of this program may have written a state file. All versions write the same fields for the process, so it
can always be found. The specification is decoded strictly: if that fails, the worker is stopped and its model is loaded
again, because the memory of every running worker must be counted.
"""

import contextlib
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Protocol
from urllib.parse import quote, unquote

import msgspec
import psutil
from msgspec import Meta, Struct

from gateway.disk_and_clock import SYSTEM_DISK, Disk
from gateway.workers.supervisor.child import start_ticks
from gateway.workers.supervisor.state import WorkerPort
from protocol.spec import WorkerSpec

log = logging.getLogger(__name__)

_SUFFIX: Final = ".json"
_ENDED: Final = "it has ended"


class ProcessIdentity(Struct, frozen=True, kw_only=True):
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


class WorkerRecord(ProcessIdentity, frozen=True, kw_only=True):
    """Content of a state file: the process, and its specification, which is compared with the configuration."""

    spec: WorkerSpec
    # Written for the previous version of this program, which identifies a process by this field.
    create_time: float = 0.0
    # Processes of the group's other local ranks.
    ranks: list[ProcessIdentity] = []


@dataclass(frozen=True, slots=True)
class Survivor:
    """Worker of an earlier gateway. If its specification cannot be decoded, `spec` is None and `reason` says why."""

    name: str
    process: ProcessIdentity
    spec: WorkerSpec | None
    reason: str = ""
    ranks: tuple[ProcessIdentity, ...] = ()


class Registry:
    """State files and epoch counter in the run directory, whose lock must be held."""

    def __init__(self, run_dir: Path, disk: Disk = SYSTEM_DISK) -> None:
        self._disk = disk
        self._folder = run_dir / "workers"
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._counter = run_dir / "epoch"
        self._epoch = max(self._read_counter(), *(survivor.process.epoch for survivor in self._recorded()), 0)

    def next_epoch(self) -> int:
        """Return an epoch that no worker of this home ever had, even if an earlier gateway crashed."""
        self._epoch += 1
        self._write(self._counter, str(self._epoch).encode())
        return self._epoch

    def add(self, record: WorkerRecord) -> None:
        self._write(self._file(record.spec.name), msgspec.json.encode(record))

    def remove(self, name: str) -> None:
        # If the worker's name is too long for a file name, there is no file.
        with contextlib.suppress(OSError):
            self._disk.unlink(self._file(name))

    def survivors(
        self, mismatch: Callable[[ProcessIdentity], str] = ProcessIdentity.mismatch, running: Iterable[Survivor] = ()
    ) -> list[Survivor]:
        """Return workers of an earlier gateway that still run. Remove all other state files, and log the reasons.

        `running` are the processes of workers that were found without their state files. A worker has none if the disk
        was full at its start. Later epochs exceed the epochs of all survivors.
        """
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
        recorded = {process.pid for survivor in alive for process in (survivor.process, *survivor.ranks)}
        alive += [survivor for survivor in running if survivor.process.pid not in recorded]
        self._epoch = max(self._epoch, *(survivor.process.epoch for survivor in alive), 0)
        return alive

    def _recorded(self) -> list[Survivor]:
        recorded: list[Survivor] = []
        for path in sorted(self._folder.glob(f"*{_SUFFIX}")):
            try:
                recorded.append(_decode(unquote(path.name.removesuffix(_SUFFIX)), path.read_bytes()))
            except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
                log.error("removed a state file that cannot be read, %s: %s", path, error)
                self._disk.unlink(path)
        return recorded

    def _read_counter(self) -> int:
        with contextlib.suppress(OSError, ValueError):
            return int(self._counter.read_bytes())
        return 0

    def _write(self, path: Path, content: bytes) -> None:
        """Write a file atomically. A full disk is only logged: the worker must serve. The next gateway finds its
        process and stops it, because its specification is unknown.
        """
        fresh = path.with_name(path.name + ".new")
        try:
            file = self._disk.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            try:
                self._disk.write_all(file, content)
            finally:
                os.close(file)
            self._disk.replace(fresh, path)
        except OSError as error:
            log.error("cannot write %s: %s", path, error)

    def _file(self, name: str) -> Path:
        return self._folder / f"{quote(name, safe='')}{_SUFFIX}"


class ProcessTable(Protocol):
    """Processes of workers on this machine; a simulation has a table of its own."""

    def spawn(self, spec: WorkerSpec) -> WorkerPort:
        """Start a worker and record it in the registry. Raises `OSError`."""
        ...

    def adopt(self, survivor: Survivor) -> WorkerPort: ...
    def mismatch(self, process: ProcessIdentity) -> str:
        """Return why a pid is not this process; empty if this process still runs."""
        ...

    def running(self) -> list[Survivor]:
        """Return the running workers of this home, whether they have state files or not."""
        ...


def _decode(name: str, content: bytes) -> Survivor:
    """Decode a state file. Raises `msgspec.DecodeError` if it does not identify a process."""
    process = msgspec.json.decode(content, type=ProcessIdentity)
    try:
        record = msgspec.json.decode(content, type=WorkerRecord)
        return Survivor(name, process, record.spec, ranks=tuple(record.ranks))
    except msgspec.DecodeError as error:
        return Survivor(name, process, None, f"another version of mlxd started it ({error})")
