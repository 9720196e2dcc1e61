"""Description of a service, and the actions that install, start and end it. Nothing here touches the machine."""

from enum import StrEnum
from pathlib import Path
from typing import Final, Protocol

from msgspec import Struct

# launchd's own default, 256, is used up by a few dozen clients.
FILES: Final = 8192
# Ending a large worker gently takes this long at worst; killing it may strand wired memory until the next boot.
TEARDOWN_S: Final = 90
STOP_S_MIN: Final = 120
COMMAND_TIMEOUT_S: Final = 300.0
# Of the machine's service. Not in its home: what root installs there, the service's user could change.
SYSTEM_PREFIX: Final = Path("/opt/mlxd")
# /usr/sbin for sysctl; a service has no shell profile.
PATH: Final = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"


class Scope(StrEnum):
    """Owner of the service: the machine (runs before any login), or the user who is logged in."""

    SYSTEM = "system"
    USER = "user"


class Service(Struct, frozen=True):
    """One installation. No secrets: what is rendered from it can be read by every user."""

    program: tuple[str, ...]
    home: Path
    user: str
    uid: int
    user_home: Path
    scope: Scope
    drain_s: float = 30.0

    @property
    def stop_s(self) -> int:
        """From SIGTERM to SIGKILL."""
        return max(STOP_S_MIN, round(self.drain_s) + TEARDOWN_S)

    @property
    def prefix(self) -> Path:
        """Folder of the link to the installed environment, and of what later verbs must know."""
        return SYSTEM_PREFIX if self.scope is Scope.SYSTEM else self.home

    @property
    def environment(self) -> dict[str, str]:
        """All of it; everything else belongs in the configuration file."""
        return {"HOME": str(self.user_home), "PATH": PATH, "MLXD_HOME": str(self.home)}


class WriteFile(Struct, frozen=True, tag=True):
    """A file that every user can read."""

    path: Path
    content: str


class PrivateFolder(Struct, frozen=True, tag=True):
    """A folder that only `user` may enter."""

    path: Path
    user: str


class RemovePath(Struct, frozen=True, tag=True):
    path: Path


class SymbolicLink(Struct, frozen=True, tag=True):
    """A symbolic link, there at every moment: an older one is replaced in one step."""

    path: Path
    target: Path


class RunCommand(Struct, frozen=True, tag=True):
    """A command. With `may_fail` its exit status does not matter."""

    argv: tuple[str, ...]
    may_fail: bool = False


class WaitUntil(Struct, frozen=True, tag=True):
    """Until what a command prints no longer matches."""

    argv: tuple[str, ...]
    pattern: str
    deadline_s: float


Action = WriteFile | PrivateFolder | RemovePath | SymbolicLink | RunCommand | WaitUntil


class HostFacts(Struct, frozen=True):
    """State of the service, as observed from the service manager."""

    is_installed: bool
    state: str
    pid: int = 0
    last_exit: str = ""


class ServiceState(HostFacts, frozen=True):
    """The same with the versions: of the installed environment, and of the daemon that answers."""

    version: str = ""
    running: str = ""


class Manager(Protocol):
    """launchd's module, or systemd's."""

    def install(self, service: Service) -> list[Action]: ...
    def uninstall(self, service: Service) -> list[Action]: ...
    def start(self, service: Service) -> list[Action]: ...
    def stop(self, service: Service) -> list[Action]: ...
    def restart(self, service: Service) -> list[Action]: ...
    def ask(self, service: Service) -> tuple[str, ...]: ...
    def facts(self, said: str) -> HostFacts: ...
