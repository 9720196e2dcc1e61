"""launchd: the property list of the service, and its `launchctl` commands."""

import plistlib
import re
from pathlib import Path
from typing import Any, Final

from gateway.service.description import (
    FILES,
    Action,
    HostFacts,
    PrivateFolder,
    RemovePath,
    RunCommand,
    Scope,
    Service,
    WaitUntil,
    WriteFile,
)

WIRED_LABEL: Final = "dev.mlxd.wired-limit"
WIRED_PATH: Final = Path("/Library/LaunchDaemons") / f"{WIRED_LABEL}.plist"


def render(service: Service) -> str:
    """Render the property list for `/Library/LaunchDaemons` or `~/Library/LaunchAgents`."""
    output = str(service.home / "logs" / "service.log")
    body: dict[str, Any] = {
        "Label": service.label,
        "ProgramArguments": [*service.program, "--launchd"],
        "EnvironmentVariables": service.environment,
        # KeepAlive implies RunAtLoad. A daemon that was stopped, or has a bad configuration, is not restarted.
        "KeepAlive": {"SuccessfulExit": False},
        "ExitTimeOut": service.stop_s,
        # The default type, Standard, has light limits on processor time and disk throughput; Interactive has none.
        "ProcessType": "Interactive",
        "SoftResourceLimits": {"NumberOfFiles": FILES},
        "HardResourceLimits": {"NumberOfFiles": FILES},
        "Umask": 0o027,
        # launchd never rotates this file, so only the start, the end and fatal errors are written to it.
        "StandardOutPath": output,
        "StandardErrorPath": output,
    }
    if service.scope is Scope.SYSTEM:
        body["UserName"] = service.user
    else:
        body["LimitLoadToSessionType"] = ["Aqua", "Background"]
    return plistlib.dumps(body, sort_keys=False).decode()


def path(service: Service) -> Path:
    root = (
        Path("/Library/LaunchDaemons") if service.scope is Scope.SYSTEM else service.user_home / "Library/LaunchAgents"
    )
    return root / f"{service.label}.plist"


def install(service: Service) -> list[Action]:
    """Return the actions that install the service in place of an older installation."""
    return [
        PrivateFolder(service.home, service.user),
        PrivateFolder(service.home / "logs", service.user),
        WriteFile(path(service), render(service)),
        *stop(service, may_fail=True),
        RunCommand(("launchctl", "enable", _target(service))),
        _bootstrap(service),
    ]


def uninstall(service: Service) -> list[Action]:
    return [*stop(service, may_fail=True), RemovePath(path(service))]


def start(service: Service) -> list[Action]:
    """Return the actions that start the service. `bootstrap` may fail, because a service that has exited is still
    loaded.
    """
    return [_bootstrap(service, may_fail=True), RunCommand(("launchctl", "kickstart", _target(service)))]


def stop(service: Service, *, may_fail: bool = False) -> list[Action]:
    """Return the actions that stop the service. They include a wait, because `bootout` returns before the daemon has
    exited.
    """
    gone = WaitUntil(("launchctl", "print", _target(service)), r"state = ", service.stop_s + 10)
    return [RunCommand(("launchctl", "bootout", _target(service)), may_fail), gone]


def restart(service: Service) -> list[Action]:
    """Return the actions that restart the daemon. It hands its workers, with their models, to the next daemon."""
    return [
        # A daemon that has already exited has no workers to hand over.
        RunCommand(("launchctl", "kill", "SIGUSR2", _target(service)), may_fail=True),
        WaitUntil(("launchctl", "print", _target(service)), r"\bpid = \d", service.stop_s),
        RunCommand(("launchctl", "kickstart", _target(service))),
    ]


def set_wired_limit(megabytes: int) -> list[Action]:
    """Return the actions that set the GPU's memory limit, now and at each boot (a boot resets it)."""
    body = {
        "Label": WIRED_LABEL,
        "ProgramArguments": ["/usr/sbin/sysctl", f"iogpu.wired_limit_mb={megabytes}"],
        "RunAtLoad": True,
    }
    return [
        RunCommand(("launchctl", "bootout", f"system/{WIRED_LABEL}"), may_fail=True),
        WriteFile(WIRED_PATH, plistlib.dumps(body, sort_keys=False).decode()),
        RunCommand(("launchctl", "bootstrap", "system", str(WIRED_PATH))),
    ]


def drop_wired_limit() -> list[Action]:
    """Return the actions that restore the system's own limit."""
    return [
        RunCommand(("launchctl", "bootout", f"system/{WIRED_LABEL}"), may_fail=True),
        RemovePath(WIRED_PATH),
        RunCommand(("/usr/sbin/sysctl", "iogpu.wired_limit_mb=0")),
    ]


def status_command(service: Service) -> tuple[str, ...]:
    return ("launchctl", "print", _target(service))


def facts(output: str) -> HostFacts:
    """Parse the output of `launchctl print`, which is empty if there is no service."""
    state = re.search(r"^\s*state = (.+)$", output, re.MULTILINE)
    pid = re.search(r"^\s*pid = (\d+)$", output, re.MULTILINE)
    last = re.search(r"^\s*last exit code = (.+)$", output, re.MULTILINE)
    return HostFacts(
        is_installed=state is not None,
        state=state[1] if state else "not loaded",
        pid=int(pid[1]) if pid else 0,
        last_exit=last[1] if last else "",
    )


def _bootstrap(service: Service, *, may_fail: bool = False) -> RunCommand:
    return RunCommand(("launchctl", "bootstrap", _domain(service), str(path(service))), may_fail)


def _domain(service: Service) -> str:
    return "system" if service.scope is Scope.SYSTEM else f"gui/{service.uid}"


def _target(service: Service) -> str:
    return f"{_domain(service)}/{service.label}"
