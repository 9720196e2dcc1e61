"""Carries out actions, or describes them for a dry run. Only this module touches the machine."""

import pwd
import re
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Protocol, assert_never

from gateway.failed import CommandFailed
from gateway.service.description import (
    COMMAND_TIMEOUT_S,
    Action,
    PrivateFolder,
    RemovePath,
    RunCommand,
    SymbolicLink,
    WaitUntil,
    WriteFile,
)
from gateway.state_dir.folder import FolderRefused, private_folder

POLL_S: Final = 0.2


class ServiceFailed(CommandFailed):
    """An action on the machine failed."""


class InstallMachine(Protocol):
    """Calls to the machine that actions need. Tests implement it, because they have no launchd."""

    def run(self, argv: tuple[str, ...]) -> tuple[int, str]:
        """Run a command, and return its exit status and output."""
        ...

    def write(self, path: Path, content: str) -> None: ...
    def folder(self, path: Path, user: str) -> None: ...
    def remove(self, path: Path) -> None: ...
    def link(self, path: Path, target: Path) -> None: ...
    def pause(self) -> None: ...


def carry_out(actions: Iterable[Action], machine: InstallMachine) -> None:
    """Carry out actions in their order. Raises `ServiceFailed` at the first failure."""
    for action in actions:
        try:
            _carry_out(action, machine)
        except FolderRefused as error:
            raise ServiceFailed(str(error)) from None
        except OSError as error:
            raise ServiceFailed(f"{error.filename or ''}: {error.strerror}".lstrip(": ")) from error
        except subprocess.TimeoutExpired as error:
            raise ServiceFailed(f"{' '.join(error.cmd)} did not end within {error.timeout:.0f} s") from error


def _carry_out(action: Action, machine: InstallMachine) -> None:
    match action:
        case WriteFile(path, content):
            machine.write(path, content)
        case PrivateFolder(path, user):
            machine.folder(path, user)
        case RemovePath(path):
            machine.remove(path)
        case SymbolicLink(path, target):
            machine.link(path, target)
        case RunCommand(argv, may_fail):
            status, output = machine.run(argv)
            if status != 0 and not may_fail:
                raise ServiceFailed(f"{' '.join(argv)} ended with {status}: {output.strip()}")
        case WaitUntil(argv, pattern, deadline_s):
            end = time.monotonic() + deadline_s
            while re.search(pattern, machine.run(argv)[1]):
                if time.monotonic() > end:
                    raise ServiceFailed(f"{' '.join(argv)} has not changed within {deadline_s:.0f} s")
                machine.pause()
        case _:
            assert_never(action)


def describe(actions: Iterable[Action]) -> str:
    """Describe the actions as a person would carry them out."""
    lines: list[str] = []
    for action in actions:
        match action:
            case WriteFile(path, content):
                lines.append(f"write {path}:\n" + "".join(f"    {line}\n" for line in content.splitlines()).rstrip())
            case PrivateFolder(path, user):
                lines.append(f"make {path} for {user} alone")
            case RemovePath(path):
                lines.append(f"remove {path}")
            case SymbolicLink(path, target):
                lines.append(f"link {path} to {target}")
            case RunCommand(argv, may_fail):
                lines.append(f"run {' '.join(argv)}" + (" (may fail)" if may_fail else ""))
            case WaitUntil(argv, pattern, deadline_s):
                lines.append(f"wait up to {deadline_s:.0f} s while {' '.join(argv)} says {pattern}")
            case _:
                assert_never(action)
    return "\n".join(lines)


class RealMachine:
    """The machine that mlxctl runs on."""

    def run(self, argv: tuple[str, ...]) -> tuple[int, str]:
        pipe, both = subprocess.PIPE, subprocess.STDOUT
        done = subprocess.run(argv, stdout=pipe, stderr=both, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
        return done.returncode, done.stdout

    def write(self, path: Path, content: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
        path.chmod(0o644)

    def folder(self, path: Path, user: str) -> None:
        owner = pwd.getpwnam(user)
        private_folder(path, owner.pw_uid, owner.pw_gid)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def link(self, path: Path, target: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(path.name + ".new")
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(target)
        fresh.replace(path)

    def pause(self) -> None:
        time.sleep(POLL_S)
