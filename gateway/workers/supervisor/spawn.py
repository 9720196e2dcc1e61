"""Worker processes: spawned with a pipe for their output, or adopted from an earlier gateway."""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
import psutil

from gateway.workers.supervisor.exit_watch import wait_exit
from gateway.workers.supervisor.os_process import start_ticks
from gateway.workers.supervisor.ports import WorkerPort
from gateway.workers.supervisor.ranks import LOCAL, RankGroup, RankStarter, ranks_of
from gateway.workers.supervisor.registry import Registry, Survivor, WorkerProcess, WorkerRecord
from protocol.spec import STDIN, GroupSpec, WorkerSpec
from protocol.timing_profile import FOLDER_ENV, wisdom_dir

worker_log = logging.getLogger("worker")

KEPT_LINES: Final = 50
LINE_BYTES_MAX: Final = 8192
READ_BYTES: Final = 65536
# How a worker's lines begin; what begins otherwise was printed by a library, or is a stack.
_LEVELS: Final = {name: getattr(logging, name) for name in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")}

Command = Callable[[WorkerSpec], list[str]]


def default_command(spec: WorkerSpec) -> list[str]:
    """`-P`: a `worker/` in the current folder must never be imported instead of ours.

    Its name and epoch tell it from every other process; the rest of the specification comes on its standard input.
    """
    rank = ["--rank", str(spec.rank.rank)] if spec.rank is not None else []
    return [sys.executable, "-P", "-m", "worker", spec.name, "--epoch", str(spec.epoch), *rank, "--spec", STDIN]


# Bytes that a pipe takes before a reader has come, on every system: macOS's number.
PIPE_BYTES: Final = 16 * 1024
REAP_S: Final = 1.0


class Spawner:
    """Starts worker processes and records them in the registry."""

    def __init__(
        self, home: Path, registry: Registry, command: Command, starters: Mapping[str, RankStarter] | None = None
    ) -> None:
        """`starters` are of the nodes that ranks of groups may run on, beside this one."""
        self._home = home
        self._registry = registry
        self._command = command
        self._starters = starters if starters is not None else {}

    def spawn(self, spec: WorkerSpec) -> WorkerPort:
        """Start a worker, or all ranks of its group; of another gateway's group one rank. Raises `OSError`."""
        if spec.group is None or spec.rank is not None:
            child, argv = self._start(spec, f"{spec.name}#{spec.epoch}", lambda: self._registry.remove(spec.name))
            self._registry.add(_record(child.pid, spec, argv, []))
            return child
        return self._spawn_group(spec, spec.group)

    def _spawn_group(self, spec: WorkerSpec, group: GroupSpec) -> WorkerPort:
        nodes = group.nodes
        places = {node: self._starters[node].place(nodes) for node in nodes if node in self._starters}
        absent = [node for node in group.nodes if node != LOCAL and node not in places]
        if absent:
            raise FileNotFoundError(f"there is no node '{absent[0]}'")
        first, *others = ranks_of(spec, places)
        lead, argv = self._start(first, f"{spec.name}#{spec.epoch}", lambda: self._registry.remove(spec.name))
        followers: list[WorkerPort] = []
        recorded: list[WorkerProcess] = []
        with contextlib.ExitStack() as undo:
            undo.callback(lambda: _kill([lead, *followers]))  # only this function knows of those that were started
            for rank, each in enumerate(others, 1):
                node = group.nodes[rank]
                if node == LOCAL:
                    child, own = self._start(each, f"{spec.name}#{spec.epoch}/{rank}", lambda: None)
                    recorded.append(
                        WorkerProcess(pid=child.pid, epoch=spec.epoch, argv=own, start_ticks=start_ticks(child.pid))
                    )
                    followers.append(child)
                else:
                    followers.append(self._starters[node].start(each))
            undo.pop_all()
        self._registry.add(_record(lead.pid, spec, argv, recorded))
        return RankGroup(lead, followers, [process.pid for process in recorded])

    def _start(self, spec: WorkerSpec, label: str, forget: Callable[[], None]) -> tuple["Child", list[str]]:
        """Start a process in a session of its own, so that no signal to our group reaches it. Raises `OSError`."""
        down = Path(spec.down.removeprefix("ipc://"))
        if not down.exists():
            # It would never hear of us, and we would wait for it until the load's deadline.
            raise FileNotFoundError(f"{down} is gone: somebody removed the run folder; restart mlxd")
        argv = self._command(spec)
        read_fd, write_fd = os.pipe()
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, read_fd)  # only this function knows of this end of the pipe
            try:
                with _input(msgspec.json.encode(spec), down.parent) as stdin:
                    popen = subprocess.Popen(
                        argv,
                        stdin=stdin,
                        stdout=write_fd,
                        stderr=write_fd,
                        cwd=self._home,
                        env={**os.environ, FOLDER_ENV: str(wisdom_dir(self._home))},
                        start_new_session=True,
                    )
            finally:
                os.close(write_fd)
            undo.pop_all()
        return Child(popen, WorkerOutput(read_fd, label), forget), argv

    def adopt(self, survivor: Survivor) -> WorkerPort:
        lead = AdoptedProcess(survivor.process, lambda: self._registry.remove(survivor.name))
        if not survivor.ranks:
            return lead
        followers = [AdoptedProcess(process, lambda: None) for process in survivor.ranks]
        return RankGroup(lead, followers, [follower.pid for follower in followers])


@contextlib.contextmanager
def _input(data: bytes, folder: Path) -> Generator[int, None, None]:
    """A descriptor that a process reads `data` from, without a wait for that process.

    A pipe where it holds all of it, so that a model starts although the disk is full; else a file without a name.
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


def _kill(processes: Sequence[WorkerPort]) -> None:
    for process in processes:
        process.signal(signal.SIGKILL)
        if isinstance(process, Child):
            process.reap()
        process.close()


def _record(pid: int, spec: WorkerSpec, argv: list[str], ranks: list[WorkerProcess]) -> WorkerRecord:
    create_time = 0.0
    with contextlib.suppress(psutil.Error):
        create_time = psutil.Process(pid).create_time()
    ticks = start_ticks(pid)
    return WorkerRecord(
        pid=pid, epoch=spec.epoch, argv=argv, start_ticks=ticks, spec=spec, create_time=create_time, ranks=ranks
    )


class Child:
    """A worker process that this gateway started."""

    is_adopted: bool = False

    def __init__(self, popen: subprocess.Popen[bytes], output: "WorkerOutput", forget: Callable[[], None]) -> None:
        self._popen = popen
        self._output = output
        self._forget = forget

    @property
    def pid(self) -> int:
        return self._popen.pid

    async def wait(self) -> int | None:
        while self._popen.poll() is None:
            await wait_exit(self.pid, lambda: self._popen.poll() is not None)
        return self._popen.returncode

    def signal(self, signum: int) -> None:
        self._popen.send_signal(signum)

    def reap(self) -> None:
        """Take note of the end of a process that has just begun and was killed: that is a matter of milliseconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(REAP_S)

    def last_lines(self) -> list[str]:
        self._output.read()
        return list(self._output.lines)

    def close(self) -> None:
        self._output.close()
        self._forget()


class AdoptedProcess:
    """A worker process that an earlier gateway started. Its output went away with that gateway."""

    is_adopted: bool = True

    def __init__(self, process: WorkerProcess, forget: Callable[[], None]) -> None:
        self._process = process
        self._forget = forget

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int | None:
        await wait_exit(self.pid, lambda: not self._process.is_alive())

    def signal(self, signum: int) -> None:
        # The pid may belong to another process by now.
        if self._process.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def last_lines(self) -> list[str]:
        return []

    def close(self) -> None:
        self._forget()


class WorkerOutput:
    """Output of a worker, copied to the log line by line; the last lines explain a crash."""

    def __init__(self, fd: int, label: str) -> None:
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._fd = fd
        self._label = label
        self._rest = b""
        self._loop = asyncio.get_running_loop()
        os.set_blocking(fd, False)
        self._loop.add_reader(fd, self.read)

    def read(self) -> None:
        """Take what is there, one buffer at a time so that a chatty worker cannot hold the loop."""
        if self._fd < 0:
            return
        try:
            data = os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(self._fd)
            return
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LINE_BYTES_MAX:
            whole.append(self._rest)
            self._rest = b""
        for line in whole:
            self._keep(line)

    def close(self) -> None:
        if self._fd < 0:
            return
        self._loop.remove_reader(self._fd)
        if self._rest:
            self._keep(self._rest)
        os.close(self._fd)
        self._fd = -1

    def _keep(self, line: bytes) -> None:
        text = line[:LINE_BYTES_MAX].decode(errors="replace").rstrip()
        if not text:
            return
        self.lines.append(text)
        word, _, rest = text.partition(" ")
        level = _LEVELS.get(word)
        if level is None:
            worker_log.info("%s: %s", self._label, text)
        else:
            # Chosen by the worker, at a level that may be another than ours.
            args = (self._label, rest)
            worker_log.handle(worker_log.makeRecord(worker_log.name, level, __file__, 0, "%s: %s", args, None))
