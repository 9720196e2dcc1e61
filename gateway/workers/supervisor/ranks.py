"""Ranks of a group: processes that run one model together, as one worker.

Rank on another machine, represented by its ssh client, a local process that ends with the rank.

ssh does not forward signals. The rank reads its specification from its standard input, and exits when that input is
closed: by this process, by the end of the client, or by a lost connection.
"""

import asyncio
import contextlib
import os
import shlex
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
from msgspec.structs import replace

from gateway.workers.supervisor.child import Child
from gateway.workers.supervisor.exits_and_restarts import CODES
from gateway.workers.supervisor.state import WorkerPort
from protocol import __version__
from protocol.failures import FINAL_EXITS, Code, ExitStatus, Failure
from protocol.group import AUTO, NCCL
from protocol.sockets import make_pair
from protocol.spec import LOCAL, GroupSpec, RankSpec, WorkerSpec

# BatchMode disables prompts. Connecting is retried, because the host may be booting, and rank 0 waits a minute for it.
# Each rank has its own connection, even if the user's ssh_config shares connections. The ranks' heartbeats notice a
# silent host.
OPTIONS: Final = (
    "BatchMode=yes",
    "ConnectTimeout=3",
    "ConnectionAttempts=10",
    "ControlMaster=no",
    "ControlPath=none",
    "ClearAllForwardings=yes",
)
# The GPUs that a process sees; set for each rank of NCCL.
_GPUS: Final = "CUDA_VISIBLE_DEVICES"
# ssh exits with this status if the connection fails or a signal ends the remote command.
SSH_FAILED: Final = 255
# A shell exits with _SIGNAL_STATUS plus the number of the signal that ended its program. It exits with one of
# _NO_PROGRAM if the program cannot be run or found.
_SIGNAL_STATUS: Final = 128
_NO_PROGRAM: Final = (126, 127)
# Environment variables are read from standard input up to an empty line, so that they do not appear in process lists.
# Without the final `exit`, the shell could replace itself with the program, and ssh would not report the signal that
# ends the program.
_SCRIPT: Final = 'while IFS= read -r line && [ -n "$line" ]; do export "$line"; done; {program}; exit $?'


def ssh_command(destination: str, python: str, arguments: Sequence[str]) -> list[str]:
    """Return the ssh command that starts a rank; `arguments` are the arguments of its Python interpreter."""
    program = shlex.join([python, *arguments, "--over-ssh", __version__])
    # The user's login shell may not be a POSIX shell.
    remote = f"exec /bin/sh -c {shlex.quote(_SCRIPT.format(program=program))}"
    return ["ssh", "-T", *(part for option in OPTIONS for part in ("-o", option)), "--", destination, remote]


def variables_of(spec: WorkerSpec) -> dict[str, str]:
    """Return the environment variables of a worker's group. With NCCL each rank of a host sees one of its GPUs, as with
    mlx.launch.
    """
    if spec.group is None or spec.rank is None:
        return {}
    group, rank = spec.group, spec.rank.rank
    variables = dict(each.split("=", 1) for each in group.envs)
    if group.backend not in (AUTO, NCCL):
        return variables
    place = group.nodes[:rank].count(group.nodes[rank])
    here = "" if group.is_remote(rank) else os.environ.get(_GPUS, "")
    gpus = (variables.get(_GPUS) or here or str(place)).split(",")
    return variables | {_GPUS: gpus[place % len(gpus)]}


def input_of(spec: WorkerSpec) -> bytes:
    """Return the command's standard input: lines of environment variables, an empty line, and the specification."""
    lines = "".join(f"{name}={value}\n" for name, value in variables_of(spec).items())
    return f"{lines}\n".encode() + msgspec.json.encode(spec) + b"\n"


@dataclass(frozen=True, slots=True)
class _SshFailure:
    """Failure of ssh, recognized by a line of its output. Only the operator can resolve a final failure."""

    printed: str
    is_final: bool
    text: str


# Known failures of ssh; the first entry that matches a line of its output applies.
_SSH_FAILURES: Final = (
    _SshFailure(
        "REMOTE HOST IDENTIFICATION HAS CHANGED",
        True,
        "its host key is another one than before: find out why, then run 'ssh-keygen -R {host}' and 'ssh {host}' as "
        "the user that mlxd runs as",
    ),
    _SshFailure(
        "Host key verification failed",
        True,
        "its host key is not known: run 'ssh {host}' once as the user that mlxd runs as, and compare the fingerprint",
    ),
    _SshFailure(
        "Permission denied (",
        True,
        "it refuses the login: give it the public key of the user that mlxd runs as with 'ssh-copy-id {host}'; the key "
        "must need no passphrase, because nobody is asked for one",
    ),
    _SshFailure(
        "Too many authentication failures",
        True,
        "it refuses the login after too many keys: name one with IdentityFile and IdentitiesOnly in ~/.ssh/config",
    ),
    _SshFailure("Could not resolve hostname", False, "its name cannot be found"),
    _SshFailure(
        "connect to host",
        False,
        "it cannot be reached: it must be on, and allow logins over ssh (on a Mac: Remote Login)",
    ),
)


class RemoteRank:
    """`WorkerPort` of a rank that `ssh` has started. `title` names it in messages."""

    is_adopted: bool = False

    def __init__(self, ssh: Child, stdin: int, title: str, destination: str) -> None:
        """Take ownership of `stdin`, the write end of the ssh client's standard input."""
        self.ssh = ssh
        self._stdin = stdin
        self._title = title
        self._destination = destination
        self._failure: Failure | None = None

    @property
    def pid(self) -> int:
        """Pid of the ssh client."""
        return self.ssh.pid

    async def wait(self) -> int | None:
        status, self._failure = self._rank_exit(await self.ssh.wait())
        return status

    def signal(self, signum: int) -> None:
        self._close_stdin()
        if signum == signal.SIGKILL:
            self.ssh.signal(signum)

    def last_lines(self) -> list[str]:
        return self.ssh.last_lines()

    def failure(self) -> Failure | None:
        return self._failure

    def close(self) -> None:
        self._close_stdin()
        self.ssh.close()

    def _close_stdin(self) -> None:
        if self._stdin >= 0:
            os.close(self._stdin)
            self._stdin = -1

    def _rank_exit(self, status: int | None) -> tuple[int | None, Failure | None]:
        """Return the exit status that a local rank would have had, and the reason of the exit if it is known."""
        lines = self.ssh.last_lines()
        if status is None or status < 0:
            why = f"its ssh client has ended (exit status {status})"
            return ExitStatus.PARTNER_LOST, self._reason(Code.WORKER_DIED, why)
        if status == SSH_FAILED:
            return self._ssh_failure(lines)
        if status in _NO_PROGRAM:
            why = f"it cannot run {sys.executable}: install mlxd there at the same path as here"
            return self._refused(ExitStatus.BAD_CONFIG, why)
        if status == 1 and any("No module named" in line for line in lines):
            why = f"{sys.executable} has no mlxd there: install it"
            return self._refused(ExitStatus.BAD_CONFIG, f"{why} of the group")
        if status == 2 and any("unrecognized arguments" in line for line in lines):
            return self._refused(ExitStatus.INCOMPATIBLE, f"mlxd is older there: install {__version__}")
        if status in FINAL_EXITS:
            errors = [line.removeprefix("ERROR ") for line in lines if line.startswith("ERROR ")]
            why = errors[-1].strip() if errors else f"it ended with exit status {status}"
            return self._refused(ExitStatus(status), why)
        if status > _SIGNAL_STATUS:
            return _SIGNAL_STATUS - status, None
        return status, None

    def _ssh_failure(self, lines: Sequence[str]) -> tuple[int, Failure]:
        for known in _SSH_FAILURES:
            line = next((line for line in lines if known.printed in line), None)
            if line is not None and known.is_final:
                return self._refused(ExitStatus.BAD_CONFIG, known.text.format(host=self._destination))
            if line is not None:
                return ExitStatus.PARTNER_LOST, self._reason(Code.WORKER_DIED, f"{known.text} ({line})")
        why = f"the connection to it has ended{f' ({lines[-1]})' if lines else ''}"
        return ExitStatus.PARTNER_LOST, self._reason(Code.WORKER_DIED, why)

    def _refused(self, status: ExitStatus, why: str) -> tuple[int, Failure]:
        return status, self._reason(CODES[status], why)

    def _reason(self, code: Code, why: str) -> Failure:
        return Failure(code, f"{self._title} on {self._destination}: {why}")


# Followers have this long to exit after rank 0. Then they get SIGTERM, and SIGKILL after TERM_S more.
FOLLOWER_GRACE_S: Final = 0.5
TERM_S: Final = 1.0
# Rank 0 has this long to exit after a follower. Then it gets SIGTERM.
LEAD_GRACE_S: Final = 2.0
_FAULTS: Final = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGABRT, signal.SIGFPE})


def is_local(group: GroupSpec) -> bool:
    """Whether all ranks run on this machine."""
    return all(node == LOCAL for node in group.nodes)


def ranks_of(spec: WorkerSpec) -> list[WorkerSpec]:
    """Return the specifications of all ranks, with new keys and free ports. Raises `OSError`."""
    assert spec.group is not None
    group = spec.group
    keys = [make_pair() for _ in group.nodes]
    plan, watch = _free_addresses(group.host(0).ips[0])
    specs: list[WorkerSpec] = []
    for rank, pair in enumerate(keys):
        own = RankSpec(
            rank=rank,
            plan=plan,
            watch=watch,
            server=keys[0].public,
            public=pair.public,
            secret=pair.secret,
            members=tuple(each.public for each in keys[1:]) if rank == 0 else (),
        )
        specs.append(_remote_spec(spec, group, own) if group.is_remote(rank) else replace(spec, rank=own))
    return specs


def _remote_spec(spec: WorkerSpec, group: GroupSpec, rank: RankSpec) -> WorkerSpec:
    """Return the specification of a rank on another machine, without this machine's sockets and template.

    The specification's memory is the share of all ranks on the rank's host.
    """
    memory_bytes = group.memory_bytes * group.beside(rank.rank) // group.size
    return replace(spec, rank=rank, down="", up="", chat_template="", memory_bytes=memory_bytes)


def _free_addresses(ip: str) -> tuple[str, str]:
    """Find two free addresses of this machine. Raises `OSError`."""
    with socket.socket() as plan_socket, socket.socket() as watch_socket:
        for each in (plan_socket, watch_socket):
            try:
                each.bind((ip, 0))
            except OSError as error:
                why = f"{ip}, of the first host in its host file, is no address of this machine, which runs rank 0"
                raise OSError(error.errno, f"{why} ({error.strerror})") from error
        plan, watch = (f"tcp://{ip}:{each.getsockname()[1]}" for each in (plan_socket, watch_socket))
        return plan, watch


class RankGroup:
    """Processes of a group as one `WorkerPort`: rank 0, which is the worker, and its followers.

    `worker/group/rank_heartbeats.py` describes how a lost rank is noticed. When `wait` returns, all processes have
    exited.
    """

    def __init__(self, lead: WorkerPort, followers: Sequence[WorkerPort], local_followers: Sequence[int]) -> None:
        """Group the processes; `local_followers` are the pids of the followers on this machine."""
        self.pids = (lead.pid, *local_followers)
        self._lead = lead
        self._followers = list(followers)
        # Followers that ended before rank 0.
        self._lost: list[WorkerPort] = []
        self._is_killed = False

    @property
    def pid(self) -> int:
        return self._lead.pid

    @property
    def is_adopted(self) -> bool:
        return self._lead.is_adopted

    async def wait(self) -> int | None:
        async with asyncio.TaskGroup() as tasks:
            lead = tasks.create_task(self._lead.wait())
            followers = [tasks.create_task(follower.wait()) for follower in self._followers]
            await asyncio.wait([lead, *followers], return_when=asyncio.FIRST_COMPLETED)
            if not lead.done() and not self._is_killed:
                self._lost = [each for each, task in zip(self._followers, followers, strict=True) if task.done()]
            lost = [task.result() for task in followers if task.done()] if self._lost else []
            if lost and await self._end([self._lead], [lead], (LEAD_GRACE_S, signal.SIGTERM), (TERM_S, signal.SIGKILL)):
                # In a clean stop, followers may exit before rank 0 and do not count as lost.
                lost = [] if lead.result() == ExitStatus.OK else lost
            await asyncio.wait([lead])
            await self._end(self._followers, followers, (FOLLOWER_GRACE_S, signal.SIGTERM), (TERM_S, signal.SIGKILL))
        return _group_status(lead.result(), lost)

    async def _end(
        self,
        processes: Sequence[WorkerPort],
        waits: "Sequence[asyncio.Task[int | None]]",
        *steps: tuple[float, signal.Signals],
    ) -> bool:
        """Send each signal after its delay to the processes that still run. Return True if no signal was needed."""
        for step, (delay_s, signum) in enumerate(steps):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await asyncio.wait(waits)
                    return step == 0
            for process, wait in zip(processes, waits, strict=True):
                if not wait.done():
                    process.signal(signum)
        await asyncio.wait(waits)
        return False

    def signal(self, signum: int) -> None:
        self._lead.signal(signum)
        if signum == signal.SIGKILL:
            self._is_killed = True
            for follower in self._followers:
                follower.signal(signum)

    def failure(self) -> Failure | None:
        return next((failure for each in self._lost if (failure := each.failure()) is not None), None)

    def last_lines(self) -> list[str]:
        others = [
            f"rank {rank}: {line}"
            for rank, follower in enumerate(self._followers, 1)
            for line in follower.last_lines()[-10:]
        ]
        return [*others, *self._lead.last_lines()]

    def close(self) -> None:
        for process in (*self._followers, self._lead):
            process.close()


def _group_status(status: int | None, lost: Sequence[int | None]) -> int | None:
    """Return the exit status of a group. `status` is that of rank 0; `lost` are those of followers that ended before
    it.
    """
    if not lost:
        # Native code that loses another rank exits with status 1, and so does the guard that ends a rank stuck in
        # native code.
        return ExitStatus.PARTNER_LOST if status == 1 else status
    final = next((each for each in lost if each in FINAL_EXITS), None)
    if final is not None:
        return final
    fault = next((each for each in lost if each is not None and -each in _FAULTS), None)
    # A request may have caused a fault in native code, so it counts as a crash of the worker.
    return ExitStatus.PARTNER_LOST if fault is None else fault
