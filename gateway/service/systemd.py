"""systemd: the unit of the service, and its `systemctl` commands."""

from pathlib import Path
from typing import Final

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

UNIT: Final = "mlxd.service"

_TEMPLATE: Final = """\
[Unit]
Description=mlxd, the serving daemon for MLX models
After=network.target

[Service]
Type=exec
ExecStart={program}
# `systemctl reload`: the configuration is read again.
ExecReload=/bin/kill -HUP $MAINPID
{user}{environment}
# The workers outlive a crash of the gateway, and the next one adopts them. Asked to stop, it ends them itself.
KillMode=process
OOMPolicy=continue
Restart=on-failure
RestartSec=5
# A bad configuration does not get better by trying again.
RestartPreventExitStatus=78
TimeoutStopSec={stop_s}
LimitNOFILE={files}
UMask=0077
NoNewPrivileges=true
{sandbox}
[Install]
WantedBy={target}
"""

# ProtectClock and PrivateDevices are left out, because they would hide the GPU; MemoryDenyWriteExecute is left out,
# because MLX compiles kernels at run time.
_SANDBOX: Final = """\
# No rights of root's, and no file to write but these. Workers that outlive the daemon would lose a private /tmp when it
# ends, so that theirs is in the home. A drop-in with ReadWritePaths= adds folders.
CapabilityBoundingSet=
ProtectSystem=strict
ReadWritePaths={home} {cache}
Environment={tmp}
PrivateTmp=true
PrivateMounts=true
ProtectKernelTunables=true
ProtectKernelModules=true
ProtectKernelLogs=true
ProtectControlGroups=true
ProtectHostname=true
RestrictNamespaces=true
RestrictRealtime=true
RestrictSUIDSGID=true
LockPersonality=true
# Netlink: looking up a host's addresses asks which kinds of them this machine has.
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM
"""


def render(service: Service) -> str:
    """Render the unit for the system's service manager or the user's."""
    is_system = service.scope is Scope.SYSTEM
    return _TEMPLATE.format(
        program=" ".join(_quote(word).replace("$", "$$") for word in service.program),
        user=f"User={service.user}\n" if is_system else "",
        environment="\n".join(f"Environment={_quote(f'{key}={value}')}" for key, value in service.environment.items()),
        stop_s=service.stop_s,
        files=FILES,
        # The user's service manager is not allowed to set up most of the sandbox.
        sandbox=_sandbox(service) if is_system else "",
        target="multi-user.target" if is_system else "default.target",
    )


def _sandbox(service: Service) -> str:
    return _SANDBOX.format(
        home=_quote(str(service.home)),
        # The cache has models and their remote code. With `-`, the folder may be missing.
        cache=_quote(f"-{service.user_home / '.cache'}"),
        tmp=_quote(f"TMPDIR={_tmp(service)}"),
    )


def _tmp(service: Service) -> Path:
    return service.home / "tmp"


def path(service: Service) -> Path:
    root = Path("/etc/systemd/system") if service.scope is Scope.SYSTEM else service.user_home / ".config/systemd/user"
    return root / UNIT


def install(service: Service) -> list[Action]:
    """Return the actions that install the service in place of an older installation."""
    is_system = service.scope is Scope.SYSTEM
    return [
        PrivateFolder(service.home, service.user),
        *([PrivateFolder(_tmp(service), service.user)] if is_system else []),
        WriteFile(path(service), render(service)),
        RunCommand(_systemctl(service, "daemon-reload")),
        RunCommand(_systemctl(service, "enable", UNIT)),
        RunCommand(_systemctl(service, "restart", UNIT)),
    ]


def uninstall(service: Service) -> list[Action]:
    return [
        RunCommand(_systemctl(service, "disable", "--now", UNIT), may_fail=True),
        RemovePath(path(service)),
        RunCommand(_systemctl(service, "daemon-reload")),
    ]


def start(service: Service) -> list[Action]:
    return [RunCommand(_systemctl(service, "start", UNIT))]


def stop(service: Service) -> list[Action]:
    return [RunCommand(_systemctl(service, "stop", UNIT))]


def restart(service: Service) -> list[Action]:
    """Return the actions that restart the daemon. It hands its workers, with their models, to the next daemon."""
    return [
        # A daemon that has already exited has no workers to hand over.
        RunCommand(_systemctl(service, "kill", "--kill-who=main", "--signal=SIGUSR2", UNIT), may_fail=True),
        WaitUntil(_systemctl(service, "is-active", UNIT), r"^(active|deactivating)", service.stop_s),
        *start(service),
    ]


def status_command(service: Service) -> tuple[str, ...]:
    return _systemctl(service, "show", "--property=LoadState,ActiveState,MainPID,ExecMainStatus", UNIT)


def facts(output: str) -> HostFacts:
    """Parse the output of `systemctl show`."""
    fields = dict(line.split("=", 1) for line in output.splitlines() if "=" in line)
    return HostFacts(
        is_installed=fields.get("LoadState") == "loaded",
        state=fields.get("ActiveState", "unknown"),
        pid=int(fields.get("MainPID") or 0),
        last_exit=fields.get("ExecMainStatus", ""),
    )


def _systemctl(service: Service, *words: str) -> tuple[str, ...]:
    return ("systemctl", *(() if service.scope is Scope.SYSTEM else ("--user",)), *words)


def _quote(word: str) -> str:
    # `%` begins a specifier of systemd; the other characters need its C-style quoting.
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"' if any(c in word for c in " \t\"'\\=;") else escaped
