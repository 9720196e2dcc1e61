"""Description of a service, and the actions that install, start and end it. Nothing here touches the machine."""

from enum import StrEnum
from pathlib import Path
from typing import Final, Protocol

from msgspec import Struct

# A few dozen clients use up launchd's own default of 256.
FILES: Final = 8192
# A large worker may take this long to end. Killing it earlier may leave wired memory allocated until the next boot.
TEARDOWN_S: Final = 90
STOP_S_MIN: Final = 120
COMMAND_TIMEOUT_S: Final = 300.0
# Prefix of the system service. It is outside of the home, where the service's user could change what root installs.
SYSTEM_PREFIX: Final = Path("/opt/mlxd")
# launchd's label of the service.
LABEL: Final = "dev.mlxd.gateway"
# /usr/sbin is included for sysctl. A service reads no shell profile.
PATH: Final = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"


# The file of authorities that HTTPS clients trust, and the time zone of budgets and usage. Neither is a secret.
PASSED_VARIABLES: Final = ("SSL_CERT_FILE", "TZ")


class Scope(StrEnum):
    """Owner of the service: the machine, which runs it before any login, or the logged-in user."""

    SYSTEM = "system"
    USER = "user"


class Service(Struct, frozen=True):
    """One installation. It contains no secrets, because every user can read the files that are made from it."""

    program: tuple[str, ...]
    home: Path
    user: str
    uid: int
    user_home: Path
    scope: Scope
    drain_s: float = 30.0
    # More environment variables: those of PASSED_VARIABLES that were set when the service was installed.
    variables: tuple[tuple[str, str], ...] = ()
    # `mlxctl selftest` installs a service of its own beside the user's. Only launchd's module knows other labels.
    label: str = LABEL

    @property
    def stop_s(self) -> int:
        """Seconds from SIGTERM to SIGKILL."""
        return max(STOP_S_MIN, round(self.drain_s) + TEARDOWN_S)

    @property
    def prefix(self) -> Path:
        """Folder with the link to the installed environment, and with the file that records the owner."""
        return SYSTEM_PREFIX if self.scope is Scope.SYSTEM else self.home

    @property
    def environment(self) -> dict[str, str]:
        """All environment variables of the service. Every other setting belongs in the configuration file."""
        return {"HOME": str(self.user_home), "PATH": PATH, "MLXD_HOME": str(self.home), **dict(self.variables)}


class WriteFile(Struct, frozen=True, tag="Write"):
    """Action: write a file that every user can read."""

    path: Path
    content: str


class PrivateFolder(Struct, frozen=True, tag="Folder"):
    """Action: create a folder that only `user` may enter."""

    path: Path
    user: str


class RemovePath(Struct, frozen=True, tag="Remove"):
    path: Path


class SymbolicLink(Struct, frozen=True, tag="Link"):
    """Action: make a symbolic link. An older link is replaced atomically, so that there is a link at every moment."""

    path: Path
    target: Path


class RunCommand(Struct, frozen=True, tag="Run"):
    """Action: run a command. With `may_fail`, its exit status is ignored."""

    argv: tuple[str, ...]
    may_fail: bool = False


class WaitUntil(Struct, frozen=True, tag="Wait"):
    """Action: wait until a command's output no longer matches."""

    argv: tuple[str, ...]
    pattern: str
    deadline_s: float


Action = WriteFile | PrivateFolder | RemovePath | SymbolicLink | RunCommand | WaitUntil


class HostFacts(Struct, frozen=True):
    """State of the service, as reported by the service manager."""

    is_installed: bool
    state: str
    pid: int = 0
    last_exit: str = ""


class ServiceState(HostFacts, frozen=True):
    """State of the service, with the versions of the installed environment and of the running daemon."""

    version: str = ""
    running: str = ""


class ServiceManager(Protocol):
    """Functions of the module for launchd and of the one for systemd."""

    def install(self, service: Service) -> list[Action]: ...
    def uninstall(self, service: Service) -> list[Action]: ...
    def start(self, service: Service) -> list[Action]: ...
    def stop(self, service: Service) -> list[Action]: ...
    def restart(self, service: Service) -> list[Action]: ...
    def status_command(self, service: Service) -> tuple[str, ...]: ...
    def facts(self, output: str) -> HostFacts: ...
