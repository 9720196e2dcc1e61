"""Carries actions out, or tells what would be done. The one place that touches the machine."""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Protocol, assert_never

from gateway.service.description import Action, Folder, Remove, Run, Wait, Write

POLL_S: Final = 0.2
COMMAND_TIMEOUT_S: Final = 300.0


class ServiceFailed(Exception):
    """What went wrong, for the operator."""


class Machine(Protocol):
    """What the actions need; tests have one of their own, for there is no launchd here."""

    def run(self, argv: tuple[str, ...]) -> tuple[int, str]:
        """Exit status, and what was printed."""
        ...

    def write(self, path: Path, content: str) -> None: ...
    def folder(self, path: Path, user: str) -> None: ...
    def remove(self, path: Path) -> None: ...
    def pause(self) -> None: ...


def carry_out(actions: Iterable[Action], machine: Machine) -> None:
    """In their order. Raises `ServiceFailed` at the first that fails."""
    for action in actions:
        try:
            _carry_out(action, machine)
        except OSError as error:
            raise ServiceFailed(f"{error.filename or ''}: {error.strerror}".lstrip(": ")) from error
        except subprocess.TimeoutExpired as error:
            raise ServiceFailed(f"{' '.join(error.cmd)} did not end within {error.timeout:.0f} s") from error


def _carry_out(action: Action, machine: Machine) -> None:
    match action:
        case Write(path, content):
            machine.write(path, content)
        case Folder(path, user):
            machine.folder(path, user)
        case Remove(path):
            machine.remove(path)
        case Run(argv, may_fail):
            status, said = machine.run(argv)
            if status != 0 and not may_fail:
                raise ServiceFailed(f"{' '.join(argv)} ended with {status}: {said.strip()}")
        case Wait(argv, pattern, deadline_s):
            end = time.monotonic() + deadline_s
            while re.search(pattern, machine.run(argv)[1]):
                if time.monotonic() > end:
                    raise ServiceFailed(f"{' '.join(argv)} has not changed within {deadline_s:.0f} s")
                machine.pause()
        case _:
            assert_never(action)


def describe(actions: Iterable[Action]) -> str:
    """The actions as a person would do them."""
    lines: list[str] = []
    for action in actions:
        match action:
            case Write(path, content):
                lines.append(f"write {path}:\n" + "".join(f"    {line}\n" for line in content.splitlines()).rstrip())
            case Folder(path, user):
                lines.append(f"make {path} for {user} alone")
            case Remove(path):
                lines.append(f"remove {path}")
            case Run(argv, may_fail):
                lines.append(f"run {' '.join(argv)}" + (" (may fail)" if may_fail else ""))
            case Wait(argv, pattern, deadline_s):
                lines.append(f"wait up to {deadline_s:.0f} s while {' '.join(argv)} says {pattern}")
            case _:
                assert_never(action)
    return "\n".join(lines)


class RealMachine:
    """This one."""

    def run(self, argv: tuple[str, ...]) -> tuple[int, str]:
        done = subprocess.run(
            argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=COMMAND_TIMEOUT_S, check=False
        )
        return done.returncode, done.stdout

    def write(self, path: Path, content: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
        path.chmod(0o644)

    def folder(self, path: Path, user: str) -> None:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.chmod(0o700)
        if os.geteuid() == 0:
            shutil.chown(path, user)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def pause(self) -> None:
        time.sleep(POLL_S)
