"""Starts worker processes with a pipe for their output, and adopts processes of an earlier gateway."""

import contextlib
import errno
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Final

import msgspec
import psutil

from gateway.workers.supervisor.child import Child, Output, start_ticks, wait_exit
from gateway.workers.supervisor.ranks import RankGroup, RemoteRank, input_of, ranks_of, ssh_command, variables_of
from gateway.workers.supervisor.registry import ProcessIdentity, Registry, Survivor, WorkerRecord
from gateway.workers.supervisor.state import WorkerPort
from protocol.failures import Failure
from protocol.spec import STDIN, GroupSpec, WorkerSpec
from protocol.timing_profile import FOLDER_ENV, profiles_dir

Command = Callable[[WorkerSpec], list[str]]


def default_command(spec: WorkerSpec) -> list[str]:
    """Return a worker's command. Name and epoch in it identify the process; standard input has the specification.

    `-P` keeps Python from importing a folder `worker/` in the current directory.
    """
    rank = ["--rank", str(spec.rank.rank)] if spec.rank is not None else []
    return [sys.executable, "-P", "-m", "worker", spec.name, "--epoch", str(spec.epoch), *rank, "--spec", STDIN]


# Capacity of a pipe that nobody reads: this many bytes on macOS, and more on Linux.
PIPE_BYTES: Final = 16 * 1024


class Spawner:
    """Starts worker processes and records them in the registry."""

    def __init__(self, home: Path, registry: Registry, command: Command) -> None:
        self._home = home
        self._registry = registry
        self._command = command

    def spawn(self, spec: WorkerSpec) -> WorkerPort:
        """Start a worker, or all ranks of its group. Raises `OSError`."""
        if spec.group is not None:
            return self._spawn_group(spec, spec.group)
        child, argv = self._start(spec, f"{spec.name}#{spec.epoch}", lambda: self._registry.remove(spec.name))
        self._registry.add(_record(child.pid, spec, argv, []))
        return child

    def _spawn_group(self, spec: WorkerSpec, group: GroupSpec) -> WorkerPort:
        first, *others = ranks_of(spec)
        label = f"{spec.name}#{spec.epoch}"
        lead, argv = self._start(first, label, lambda: self._registry.remove(spec.name))
        children, followers = [lead], list[WorkerPort]()
        recorded: list[ProcessIdentity] = []
        with contextlib.ExitStack() as undo:
            undo.callback(lambda: _kill(children, [lead, *followers]))
            for rank, each in enumerate(others, 1):
                if group.is_remote(rank):
                    remote = self._start_remote(each, group, rank)
                    children.append(remote.ssh)
                    followers.append(remote)
                    continue
                child, own = self._start(each, f"{label}/{rank}", lambda: None)
                ticks = start_ticks(child.pid)
                recorded.append(ProcessIdentity(pid=child.pid, epoch=spec.epoch, argv=own, start_ticks=ticks))
                children.append(child)
                followers.append(child)
            undo.pop_all()
        self._registry.add(_record(lead.pid, spec, argv, recorded))
        return RankGroup(lead, followers, [process.pid for process in recorded])

    def _start(self, spec: WorkerSpec, label: str, forget: Callable[[], None]) -> tuple[Child, list[str]]:
        """Start a process on this machine. Raises `OSError`."""
        down = Path(spec.down.removeprefix("ipc://"))
        if not down.exists():
            # The worker could not connect without this socket, and its load would time out.
            raise FileNotFoundError(f"{down} is gone: somebody removed the run folder; restart mlxd")
        argv = self._command(spec)
        variables = {FOLDER_ENV: str(profiles_dir(self._home))} | variables_of(spec)
        with _input(msgspec.json.encode(spec), down.parent) as stdin:
            return self._popen(argv, stdin, label, forget, variables), argv

    def _start_remote(self, spec: WorkerSpec, group: GroupSpec, rank: int) -> RemoteRank:
        """Start a rank over ssh without waiting for the connection, whose failure ends ssh. Raises `OSError`."""
        destination = group.hosts[rank].ssh
        argv = ssh_command(destination, sys.executable, self._command(spec)[1:])
        data = input_of(spec)
        if len(data) > PIPE_BYTES:
            raise OSError(errno.E2BIG, f"the specification of rank {rank} has {len(data)} bytes")
        read_fd, write_fd = os.pipe()
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, write_fd)
            try:
                os.write(write_fd, data)
                ssh = self._popen(argv, read_fd, f"{spec.name}#{spec.epoch}/{rank} ({destination})", lambda: None, {})
            finally:
                os.close(read_fd)
            undo.pop_all()
        return RemoteRank(ssh, write_fd, f"rank {rank} of '{spec.name}'", destination)

    def _popen(
        self, argv: Sequence[str], stdin: int, label: str, forget: Callable[[], None], variables: dict[str, str]
    ) -> Child:
        """Start a process in its own session, so that signals to this group do not reach it. Raises `OSError`."""
        read_fd, write_fd = os.pipe()
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, read_fd)
            try:
                popen = subprocess.Popen(
                    argv,
                    stdin=stdin,
                    stdout=write_fd,
                    stderr=write_fd,
                    cwd=self._home,
                    env=os.environ | variables,
                    start_new_session=True,
                )
            finally:
                os.close(write_fd)
            undo.pop_all()
        return Child(popen, Output(read_fd, label), forget)

    def mismatch(self, process: ProcessIdentity) -> str:
        return process.mismatch()

    def running(self) -> list[Survivor]:
        """Return the running workers of this home, whether they have state files or not."""
        return [
            survivor for process in psutil.process_iter() if (survivor := _worker_of(process, self._home)) is not None
        ]

    def adopt(self, survivor: Survivor) -> WorkerPort:
        lead = AdoptedProcess(survivor.process, lambda: self._registry.remove(survivor.name))
        if not survivor.ranks:
            return lead
        followers = [AdoptedProcess(process, lambda: None) for process in survivor.ranks]
        return RankGroup(lead, followers, [follower.pid for follower in followers])


@contextlib.contextmanager
def _input(data: bytes, folder: Path) -> Generator[int, None, None]:
    """Yield a file descriptor from which a process can read `data` later.

    It is a pipe if `data` fits into one, so that a model can start even while the disk is full. Larger data is in an
    unnamed file.
    """
    if len(data) > PIPE_BYTES:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(data)
            file.seek(0)
            yield file.fileno()
        return
    read_fd, write_fd = os.pipe()
    try:
        os.write(write_fd, data)
        os.close(write_fd)
        yield read_fd
    finally:
        os.close(read_fd)


def _kill(children: Sequence[Child], processes: Sequence[WorkerPort]) -> None:
    """Kill all children, then release the resources of all processes."""
    for child in children:
        child.signal(signal.SIGKILL)
        child.reap()
    for process in processes:
        process.close()


def _record(pid: int, spec: WorkerSpec, argv: list[str], ranks: list[ProcessIdentity]) -> WorkerRecord:
    create_time = 0.0
    with contextlib.suppress(psutil.Error):
        create_time = psutil.Process(pid).create_time()
    ticks = start_ticks(pid)
    return WorkerRecord(
        pid=pid, epoch=spec.epoch, argv=argv, start_ticks=ticks, spec=spec, create_time=create_time, ranks=ranks
    )


def _worker_of(process: psutil.Process, home: Path) -> Survivor | None:
    """Return the worker that a process is, by the arguments of `default_command`; None if it is none of this home."""
    try:
        argv = process.cmdline()
        match argv[1:]:
            case ["-P", "-m", "worker", name, "--epoch", number, *rank, "--spec", "-"] if len(rank) in (0, 2):
                epoch = int(number)
            case _:
                return None
        # `mlxctl verify` starts a worker of epoch 0, which belongs to no gateway.
        if epoch < 1 or os.path.realpath(process.cwd()) != os.path.realpath(home):
            return None
    except (psutil.Error, OSError, ValueError):
        return None
    worker = ProcessIdentity(pid=process.pid, epoch=epoch, argv=argv, start_ticks=start_ticks(process.pid))
    return Survivor(name, worker, None, "it has no state file")


class AdoptedProcess:
    """Worker process that an earlier gateway started. Its output is lost."""

    is_adopted: bool = True

    def __init__(self, process: ProcessIdentity, forget: Callable[[], None]) -> None:
        self._process = process
        self._forget = forget

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int | None:
        await wait_exit(self.pid, lambda: not self._process.is_alive())

    def signal(self, signum: int) -> None:
        # The system may give the pid to another process after the exit.
        if self._process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def last_lines(self) -> list[str]:
        return []

    def failure(self) -> Failure | None:
        return None

    def close(self) -> None:
        self._forget()
