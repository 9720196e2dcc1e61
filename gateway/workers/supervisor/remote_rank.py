"""Rank on another machine: the process of its ssh client, which logs in, encrypts, and ends with its rank.

ssh passes no signals on. The rank reads its specification from its standard input, and ends when that ends: when this
end of it is closed, when the client is killed, and when the connection is lost.
"""

import os
import shlex
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from gateway.workers.supervisor.child import Child
from gateway.workers.supervisor.postmortem import CODES
from protocol import __version__
from protocol.failures import FINAL_EXITS, Code, ExitStatus, Failure
from protocol.spec import WorkerSpec

# No question is asked: there is nobody to answer. A host that is silent is lost as soon as one whose rank is; one that
# does not answer at first may be starting again, and rank 0 waits for it for a minute. Each rank has a connection of
# its own, whatever the user's configuration shares.
OPTIONS: Final = (
    "BatchMode=yes",
    "ConnectTimeout=3",
    "ConnectionAttempts=10",
    "ServerAliveInterval=2",
    "ServerAliveCountMax=3",
    "ControlMaster=no",
    "ControlPath=none",
    "ClearAllForwardings=yes",
)
# The exit status of ssh itself, and of a rank that a signal has ended.
SSH_FAILED: Final = 255
# As a shell reports an end by a signal, a program that it cannot run, and one that it cannot find.
_BY_SIGNAL: Final = 128
_NO_PROGRAM: Final = (126, 127)
# Variables are read line by line up to an empty one, so that none of them stands in a list of processes. Without the
# last command the shell would give way to its program, and a signal that ends that would be lost on the way.
_SCRIPT: Final = 'while IFS= read -r line && [ -n "$line" ]; do export "$line"; done; {program}; exit $?'


def ssh_command(destination: str, python: str, arguments: Sequence[str]) -> list[str]:
    """The command that starts a rank with these arguments of the interpreter."""
    program = shlex.join([python, *arguments, "--over-ssh", __version__])
    # The login shell may be any; this one is everywhere.
    remote = f"exec /bin/sh -c {shlex.quote(_SCRIPT.format(program=program))}"
    return ["ssh", "-T", *(part for option in OPTIONS for part in ("-o", option)), "--", destination, remote]


def input_of(spec: WorkerSpec, envs: Sequence[str]) -> bytes:
    """What the command reads, in lines: variables, an empty one, and the specification."""
    return "".join(f"{each}\n" for each in (*envs, "")).encode() + msgspec.json.encode(spec) + b"\n"


@dataclass(frozen=True, slots=True)
class _Trouble:
    """A failure of ssh, by what it prints. What `is_final` needs the operator, everything else another attempt."""

    sign: str
    is_final: bool
    text: str


# The first that is found counts. `{host}` is its destination.
_TROUBLES: Final = (
    _Trouble(
        "REMOTE HOST IDENTIFICATION HAS CHANGED",
        True,
        "its host key is another one than before: find out why, then run 'ssh-keygen -R {host}' and 'ssh {host}' as "
        "the user that mlxd runs as",
    ),
    _Trouble(
        "Host key verification failed",
        True,
        "its host key is not known: run 'ssh {host}' once as the user that mlxd runs as, and compare the fingerprint",
    ),
    _Trouble(
        "Permission denied (",
        True,
        "it refuses the login: give it the public key of the user that mlxd runs as with 'ssh-copy-id {host}'; the key "
        "must need no passphrase, because nobody is asked for one",
    ),
    _Trouble(
        "Too many authentication failures",
        True,
        "it refuses the login after too many keys: name one with IdentityFile and IdentitiesOnly in ~/.ssh/config",
    ),
    _Trouble("Could not resolve hostname", False, "its name cannot be found"),
    _Trouble(
        "connect to host",
        False,
        "it cannot be reached: it must be on, and allow logins over ssh (on a Mac: Remote Login)",
    ),
)


class RemoteRank:
    """`Process` of a rank that `ssh` has started. `title` names it, for people."""

    is_adopted: bool = False

    def __init__(self, ssh: Child, stdin: int, title: str, destination: str, python: str) -> None:
        """Owns `stdin`, the descriptor that the client's standard input is written to."""
        self.ssh = ssh
        self._stdin = stdin
        self._title = title
        self._destination = destination
        self._python = python
        self._failure: Failure | None = None

    @property
    def pid(self) -> int:
        """Of the client, which is on this machine."""
        return self.ssh.pid

    async def wait(self) -> int | None:
        status, self._failure = self._end_of(await self.ssh.wait())
        return status

    def signal(self, signum: int) -> None:
        self._end_input()
        if signum == signal.SIGKILL:
            self.ssh.signal(signum)

    def last_lines(self) -> list[str]:
        return self.ssh.last_lines()

    def failure(self) -> Failure | None:
        return self._failure

    def close(self) -> None:
        self._end_input()
        self.ssh.close()

    def _end_input(self) -> None:
        if self._stdin >= 0:
            os.close(self._stdin)
            self._stdin = -1

    def _end_of(self, status: int | None) -> tuple[int | None, Failure | None]:
        """The exit status that a rank of this machine would have had, and the reason of its end where one is known."""
        lines = self.ssh.last_lines()
        if status is None or status < 0:
            why = f"its ssh client has ended (exit status {status})"
            return ExitStatus.PARTNER_LOST, self._reason(Code.WORKER_DIED, why)
        if status == SSH_FAILED:
            return self._lost(lines)
        if status in _NO_PROGRAM:
            why = f"it cannot run {self._python}: install mlxd there, and name its interpreter as python of the group"
            return self._refused(ExitStatus.BAD_CONFIG, why)
        if status == 1 and any("No module named" in line for line in lines):
            why = f"{self._python} has no mlxd there: install it, or name the interpreter that has it as python"
            return self._refused(ExitStatus.BAD_CONFIG, f"{why} of the group")
        if status == 2 and any("unrecognized arguments" in line for line in lines):
            return self._refused(ExitStatus.INCOMPATIBLE, f"mlxd is older there: install {__version__}")
        if status in FINAL_EXITS:
            said = [line.removeprefix("ERROR ") for line in lines if line.startswith("ERROR ")]
            return self._refused(
                ExitStatus(status), said[-1].strip() if said else f"it ended with exit status {status}"
            )
        if status > _BY_SIGNAL:
            return _BY_SIGNAL - status, None
        return status, None

    def _lost(self, lines: Sequence[str]) -> tuple[int, Failure]:
        for trouble in _TROUBLES:
            line = next((line for line in lines if trouble.sign in line), None)
            if line is not None and trouble.is_final:
                return self._refused(ExitStatus.BAD_CONFIG, trouble.text.format(host=self._destination))
            if line is not None:
                return ExitStatus.PARTNER_LOST, self._reason(Code.WORKER_DIED, f"{trouble.text} ({line})")
        why = f"the connection to it has ended{f' ({lines[-1]})' if lines else ''}"
        return ExitStatus.PARTNER_LOST, self._reason(Code.WORKER_DIED, why)

    def _refused(self, status: ExitStatus, why: str) -> tuple[int, Failure]:
        return status, self._reason(CODES[status], why)

    def _reason(self, code: Code, why: str) -> Failure:
        return Failure(code, f"{self._title} on {self._destination}: {why}")
