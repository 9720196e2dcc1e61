"""Another version of mlxd: fetched beside the running one, tried, switched to, and given up when it is not ready."""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from msgspec import Struct, json

from gateway.failed import Failed
from gateway.install.description import Action, Link, Manager, RemoveTree, Service, Write
from gateway.install.executor import Machine, ServiceFailed, carry_out
from gateway.install.fetch import Source, check, install
from gateway.install.releases import RELEASE_FILE, Release, Releases, fingerprint, version_of

# A daemon that does not even answer after this long will not become ready.
ANSWER_S: Final = 60.0


class Seen(Struct, frozen=True):
    """The daemon that answers. `env`: what it runs from; `missing`: why it is not ready, empty when it is."""

    pid: int
    env: Path
    missing: str = ""


class Observer(Protocol):
    """Port of an upgrade to the running daemon. Raises `Failed`."""

    def look(self) -> Seen | None:
        """None when no daemon answers."""
        ...

    def complete(self) -> None:
        """One token of a model that is loaded, if one is."""
        ...

    def roll(self, env: Path) -> list[str]:
        """Restart, one after the other and the idle first, the workers that run from elsewhere than `env`."""
        ...

    def in_use(self) -> set[Path]:
        """Environments that a process of mlxd runs from."""
        ...


@dataclass(frozen=True, slots=True)
class Wanted:
    """Version to install and how: `base` is the Python to make environments with, `uv` the program if there is one."""

    source: Source
    base: Path
    uv: str | None
    keep: int
    deadline_s: float
    keep_workers: bool = False


class Upgrade:
    """One change of version of one service. `tell` gets a line for each step."""

    def __init__(
        self,
        service: Service,
        manager: Manager,
        machine: Machine,
        observer: Observer,
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._service = service
        self._manager = manager
        self._machine = machine
        self._observer = observer
        self._tell = tell
        self._clock = clock
        self._releases = Releases(service.prefix)

    def run(self, wanted: Wanted) -> Path:
        """Install and switch. Returns the new environment. Raises `ServiceFailed`; then what ran before runs again."""
        with locked(self._service.prefix):
            env = self._fetch(wanted)
            self._tell(f"{version_of(env)} reads the configuration and generates")
            try:
                self._switch(env, wanted.deadline_s, keep_workers=wanted.keep_workers)
            except ServiceFailed:
                # A worker may run from it by now.
                if env not in {*self._observer.in_use(), self._releases.current}:
                    carry_out([RemoveTree(env)], self._machine)
                raise
            self._prune(wanted.keep)
            return env

    def back(self, deadline_s: float) -> Path:
        """To the version before. Returns its environment. Raises `ServiceFailed`; then what ran before runs again."""
        with locked(self._service.prefix):
            env = self._releases.previous
            if env is None or not version_of(env):
                raise ServiceFailed(f"there is no version to roll back to ({self._releases.previous_link})")
            self._switch(env, deadline_s, keep_workers=False)
            return env

    def _fetch(self, wanted: Wanted) -> Path:
        env = self._releases.fresh()
        self._tell(f"installing {wanted.source.what} into {env}")
        try:
            carry_out(install(env, wanted.source, wanted.base, wanted.uv), self._machine)
            version = version_of(env)
            if not version:
                raise ServiceFailed(f"{wanted.source.what} does not contain mlxd")
            if wanted.source.version not in ("", version):
                raise ServiceFailed(f"{wanted.source.find} has mlxd {version}, not {wanted.source.version}")
            carry_out(check(env, self._service), self._machine)
        except BaseException:  # Whatever it was, ^C too, and it goes on: no half of an environment stays.
            carry_out([RemoveTree(env)], self._machine)
            raise
        release = Release(version, wanted.source.what, wanted.source.find)
        carry_out([Write(env / RELEASE_FILE, json.encode(release).decode() + "\n")], self._machine)
        return env

    def _switch(self, env: Path, deadline_s: float, *, keep_workers: bool) -> None:
        before = self._releases.current
        if before is None:
            raise ServiceFailed(f"there is no {self._releases.current_link}: mlxctl service install makes it")
        running = self._observer.look()
        try:
            carry_out([Link(self._releases.current_link, env)], self._machine)
            begin = self._manager.restart if running is not None else self._manager.start
            carry_out(begin(self._service), self._machine)
            self._tell(f"switched to {version_of(env)}, waiting until it is ready")
            self._wait(env, running, deadline_s)
            self._observer.complete()
            self._roll(before, env, keep_workers=keep_workers)
        except (Failed, KeyboardInterrupt) as error:
            why = str(error) or "interrupted"
            self._tell(f"{version_of(env)} failed its checks: {why}; rolling back to {version_of(before)}")
            self._undo(before, deadline_s)
            raise ServiceFailed(
                f"rolled back to {version_of(before)}: {version_of(env)} failed its checks: {why}"
            ) from None
        carry_out([Link(self._releases.previous_link, before)], self._machine)

    def _roll(self, before: Path, env: Path, *, keep_workers: bool) -> None:
        old = fingerprint(before)
        if keep_workers or (old and old == fingerprint(env)):
            return
        for model in self._observer.roll(env):
            self._tell(f"{model} runs the new version")

    def _undo(self, env: Path, deadline_s: float) -> None:
        failed = self._observer.look()
        carry_out([Link(self._releases.current_link, env), *self._manager.revive(self._service)], self._machine)
        self._wait(env, failed, deadline_s)

    def _wait(self, env: Path, before: Seen | None, deadline_s: float) -> None:
        """Until another daemon than `before` is ready, and is what was installed."""
        began = self._clock()
        while True:
            seen = self._observer.look()
            is_new = seen is not None and (before is None or seen.pid != before.pid)
            if seen is not None and is_new:
                if seen.env != env:
                    raise ServiceFailed(
                        f"the daemon runs from {seen.env}, not from {env}: mlxctl service install again"
                    )
                if not seen.missing:
                    return
            waited = self._clock() - began
            if not is_new and waited > min(ANSWER_S, deadline_s):
                raise ServiceFailed(
                    f"no daemon of {version_of(env)} answers after {waited:.0f} s (mlxctl service logs)"
                )
            if waited > deadline_s:
                raise ServiceFailed(f"not ready after {waited:.0f} s: {seen.missing if seen else 'no answer'}")
            self._machine.pause()

    def _prune(self, keep: int) -> None:
        for env in self._releases.stale(keep, self._observer.in_use()):
            self._tell(f"removing {env} ({version_of(env) or 'incomplete'})")
            carry_out([RemoveTree(env)], self._machine)


@contextlib.contextmanager
def locked(prefix: Path) -> Generator[None, None, None]:
    """One change of version at a time. The kernel drops the lock when we die. Raises `ServiceFailed`."""
    try:
        prefix.mkdir(parents=True, exist_ok=True)
        fd = os.open(prefix / "versions.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ServiceFailed(f"{error.filename}: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise ServiceFailed("another upgrade or rollback is in progress") from None
    else:
        yield
    finally:
        os.close(fd)


def plan(service: Service, manager: Manager, wanted: Wanted) -> Iterator[Action]:
    """All that an upgrade would do if everything goes well, for people to read."""
    releases = Releases(service.prefix)
    env = releases.fresh()
    yield from install(env, wanted.source, wanted.base, wanted.uv)
    yield from check(env, service)
    yield Link(releases.current_link, env)
    yield from manager.restart(service)
    if (current := releases.current) is not None:
        yield Link(releases.previous_link, current)
