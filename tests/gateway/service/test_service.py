import configparser
import os
import plistlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from gateway.ctl.doctor.checks import wired_limit, wired_max
from gateway.service import launchd, systemd
from gateway.service.description import HostFacts, RunCommand, Scope, Service, ServiceManager, WriteFile
from gateway.service.installer import ServiceFailed, carry_out, describe
from tests.support.ctl import ctl
from tests.support.scale import patient

DAEMON = Service(
    ("/opt/mlxd/bin/python", "-P", "-m", "gateway.main"),
    Path("/var/mlxd/.mlxd"),
    "mlxd",
    501,
    Path("/var/mlxd"),
    Scope.SYSTEM,
)
AGENT = Service(
    ("/Users/a b/100%/python", "-P", "-m", "gateway.main"),
    Path("/Users/a b/.mlxd"),
    "ab",
    502,
    Path("/Users/a b"),
    Scope.USER,
    drain_s=600,
)


# launchd.plist(5)
LAUNCHD_KEYS = {
    "Label": str,
    "ProgramArguments": list,
    "EnvironmentVariables": dict,
    "KeepAlive": dict,
    "ExitTimeOut": int,
    "ProcessType": str,
    "SoftResourceLimits": dict,
    "HardResourceLimits": dict,
    "Umask": int,
    "StandardOutPath": str,
    "StandardErrorPath": str,
    "UserName": str,
    "LimitLoadToSessionType": list,
}


class Recorded:
    """A machine that only remembers; `says` is what its commands answer, in their order."""

    def __init__(self, *says: tuple[int, str]) -> None:
        self.says = list(says)
        self.did: list[str] = []
        self.pauses = 0

    def run(self, argv: tuple[str, ...]) -> tuple[int, str]:
        self.did.append(" ".join(argv))
        return self.says.pop(0) if self.says else (0, "")

    def write(self, path: Path, content: str) -> None:
        self.did.append(f"write {path}")

    def folder(self, path: Path, user: str) -> None:
        self.did.append(f"folder {path} {user}")

    def remove(self, path: Path) -> None:
        self.did.append(f"remove {path}")

    def remove_tree(self, path: Path) -> None:
        self.did.append(f"remove all of {path}")

    def link(self, path: Path, target: Path) -> None:
        self.did.append(f"link {path} {target}")

    def pause(self) -> None:
        self.pauses += 1


@pytest.mark.parametrize("service", [DAEMON, AGENT])
def test_the_property_list_keeps_the_rules_of_a_daemon_with_large_children(service: Service) -> None:
    plist = plistlib.loads(launchd.render(service).encode())

    assert plist["ProgramArguments"] == [*service.program, "--launchd"]
    assert plist["KeepAlive"] == {"SuccessfulExit": False}
    assert plist["ExitTimeOut"] >= 120
    assert plist["ExitTimeOut"] >= service.drain_s + 60
    assert plist["ProcessType"] == "Interactive"
    assert plist["SoftResourceLimits"] == plist["HardResourceLimits"] == {"NumberOfFiles": 8192}
    assert set(plist["EnvironmentVariables"]) == {"HOME", "PATH", "MLXD_HOME"}
    assert "/usr/sbin" in plist["EnvironmentVariables"]["PATH"].split(":")
    assert not {"AbandonProcessGroup", "ThrottleInterval", "Debug"} & set(plist)


def test_launchd_is_told_of_success_when_trying_again_would_not_help(tmp_path: Path) -> None:
    (tmp_path / "mlxd.toml").write_text("[server]\nprot = 1\n")

    def start(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-m", "gateway.main", *words]
        environment = os.environ | {"MLXD_HOME": str(tmp_path)}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=patient(30))

    assert start().returncode == 78
    done = start("--launchd")
    assert done.returncode == 0
    assert "mlxd.toml:2" in done.stderr


@pytest.mark.parametrize("service", [DAEMON, AGENT])
def test_a_property_list_has_only_keys_that_launchd_knows_with_values_of_their_types(service: Service) -> None:
    plist = plistlib.loads(launchd.render(service).encode())

    assert {key: type(value) for key, value in plist.items()} == {key: LAUNCHD_KEYS[key] for key in plist}
    assert set(plist["KeepAlive"]) == {"SuccessfulExit"}
    # Whoever may read the list, or the arguments of a process, finds no secret there.
    words = [*plist["ProgramArguments"], *plist["EnvironmentVariables"].values()]
    assert not [word for word in words if re.search("key|token|secret|password", word, re.IGNORECASE)]


def test_a_launch_daemon_has_a_user_and_an_agent_its_sessions() -> None:
    daemon, agent = (plistlib.loads(launchd.render(service).encode()) for service in (DAEMON, AGENT))

    assert daemon["UserName"] == "mlxd"
    assert "UserName" not in agent
    assert agent["LimitLoadToSessionType"] == ["Aqua", "Background"]
    assert launchd.path(DAEMON) == Path("/Library/LaunchDaemons/dev.mlxd.gateway.plist")
    assert launchd.path(AGENT) == Path("/Users/a b/Library/LaunchAgents/dev.mlxd.gateway.plist")


def test_the_unit_lets_workers_outlive_a_crash_and_gives_time_to_stop() -> None:
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(systemd.render(DAEMON))
    service = unit["Service"]

    assert (service["Type"], service["KillMode"], service["Restart"]) == ("exec", "process", "on-failure")
    assert int(service["TimeoutStopSec"]) >= 120
    assert int(service["LimitNOFILE"]) >= 8192
    assert service["User"] == "mlxd"
    assert service["OOMPolicy"] == "continue"
    assert unit["Install"]["WantedBy"] == "multi-user.target"
    assert systemd.path(DAEMON) == Path("/etc/systemd/system/mlxd.service")
    text = systemd.render(AGENT)
    assert "User=" not in text
    assert 'ExecStart="/Users/a b/100%%/python" -P -m gateway.main\n' in text
    assert "ExecReload=/bin/kill -HUP $MAINPID\n" in text
    assert 'Environment="HOME=/Users/a b"\n' in text
    assert "WantedBy=default.target" in text


def test_the_machines_unit_takes_what_the_service_does_not_need_and_leaves_what_workers_do() -> None:
    text = systemd.render(DAEMON)
    assert "ReadWritePaths=/var/mlxd/.mlxd -/var/mlxd/.cache\n" in text
    assert 'Environment="TMPDIR=/var/mlxd/.mlxd/tmp"\n' in text
    for line in ("CapabilityBoundingSet=", "ProtectSystem=strict", "SystemCallFilter=@system-service", "UMask=0077"):
        assert f"\n{line}\n" in text
    # The GPU's devices, the compiled kernels of MLX, and what workers share beyond the daemon's end.
    assert not {"PrivateDevices", "ProtectClock", "MemoryDenyWriteExecute", "RemoveIPC"} & set(
        re.findall(r"(?m)^\w+", text)
    )
    assert "ProtectSystem" not in systemd.render(AGENT)
    machine = Recorded()
    carry_out(systemd.install(DAEMON), machine)
    assert machine.did[:2] == ["folder /var/mlxd/.mlxd mlxd", "folder /var/mlxd/.mlxd/tmp mlxd"]


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
def test_systemd_itself_finds_the_unit_hardly_exposed(tmp_path: Path) -> None:
    unit = tmp_path / "mlxd.service"
    unit.write_text(systemd.render(DAEMON))

    command = ["systemd-analyze", "security", "--offline=true", "--threshold=30", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(30))

    assert done.returncode == 0, done.stdout.splitlines()[-1]


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
def test_systemd_itself_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "mlxd.service"
    unit.write_text(systemd.render(_with_program(sys.executable)))

    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=patient(30))

    ours = [line for line in done.stderr.splitlines() if "mlxd.service" in line]
    assert ours == [], done.stderr


def test_launchd_is_booted_out_and_waited_for_before_it_is_booted_in() -> None:
    machine = Recorded((3, "no such process"), (0, "state = running\n pid = 7"), (0, "state = exited"), (113, "gone"))

    carry_out(launchd.install(DAEMON), machine)

    plist = "/Library/LaunchDaemons/dev.mlxd.gateway.plist"
    target = "system/dev.mlxd.gateway"
    assert machine.did == [
        "folder /var/mlxd/.mlxd mlxd",
        "folder /var/mlxd/.mlxd/logs mlxd",
        f"write {plist}",
        f"launchctl bootout {target}",
        *[f"launchctl print {target}"] * 3,
        f"launchctl enable {target}",
        f"launchctl bootstrap system {plist}",
    ]
    assert machine.pauses == 2


def test_a_restart_hands_the_workers_over() -> None:
    machine = Recorded((0, ""), (0, "active"), (0, "deactivating"), (3, "inactive"))
    carry_out(systemd.restart(AGENT), machine)

    assert machine.did[0] == "systemctl --user kill --kill-who=main --signal=SIGUSR2 mlxd.service"
    assert machine.did[-1] == "systemctl --user start mlxd.service"
    assert machine.pauses == 2

    machine = Recorded((0, ""), (0, "\tstate = running\n\tpid = 7\n"), (0, "\tstate = not running\n"))
    carry_out(launchd.restart(AGENT), machine)
    target = "gui/502/dev.mlxd.gateway"
    assert (machine.did[0], machine.did[-1]) == (f"launchctl kill SIGUSR2 {target}", f"launchctl kickstart {target}")


@pytest.mark.parametrize("manager", [launchd, systemd])
def test_a_restart_starts_a_daemon_that_has_ended(manager: ServiceManager) -> None:
    machine = Recorded((1, "No main process to kill"), (3, "inactive"))

    carry_out(manager.restart(AGENT), machine)

    assert "start" in machine.did[-1]


def test_what_fails_ends_it_and_is_said_with_the_commands_own_words() -> None:
    machine = Recorded((0, ""), (113, "gone"), (0, ""), (5, "Bootstrap failed: 5: Input/output error\n"))

    with pytest.raises(ServiceFailed, match=r"launchctl bootstrap .* ended with 5: Bootstrap failed"):
        carry_out([*launchd.install(AGENT), RunCommand(("never",))], machine)
    assert "never" not in machine.did


def test_starting_begins_what_is_known_to_launchd_but_has_ended() -> None:
    machine = Recorded((37, "Bootstrap failed: 37: Operation already in progress"))

    carry_out(launchd.start(AGENT), machine)

    assert machine.did[-1] == "launchctl kickstart gui/502/dev.mlxd.gateway"


def test_the_wired_limit_is_set_now_and_at_each_boot(tmp_path: Path) -> None:
    first, write, last = launchd.set_wired_limit(98304)
    assert first == RunCommand(("launchctl", "bootout", "system/dev.mlxd.wired-limit"), may_fail=True)
    assert isinstance(write, WriteFile)
    plist = plistlib.loads(write.content.encode())
    assert plist["ProgramArguments"] == ["/usr/sbin/sysctl", "iogpu.wired_limit_mb=98304"]
    assert plist["RunAtLoad"] is True
    assert last == RunCommand(("launchctl", "bootstrap", "system", str(write.path)))

    assert "iogpu.wired_limit_mb=98304" in ctl(tmp_path, "service", "wired-limit", "96", "--dry-run").stdout
    assert f"remove {write.path}" in ctl(tmp_path, "service", "wired-limit", "0", "--dry-run").stdout


def test_without_a_number_the_wired_limit_is_the_budget_or_what_leaves_the_system_enough(tmp_path: Path) -> None:
    def limit() -> int:
        said = ctl(tmp_path, "service", "wired-limit", "--dry-run").stdout
        return int(re.findall(r"iogpu\.wired_limit_mb=(\d+)", said)[0])

    (tmp_path / "mlxd.toml").write_text('[memory]\nbudget = "96GiB"\n')
    assert limit() == 96 * 1024
    (tmp_path / "mlxd.toml").write_text("")
    ram = psutil.virtual_memory().total
    assert limit() == wired_max(ram) // 1024**2
    assert wired_limit(str(limit()), ram).level == "ok"


@pytest.mark.skipif(sys.platform == "darwin", reason="it would be done")
def test_the_wired_limit_is_refused_where_there_is_none(tmp_path: Path) -> None:
    done = ctl(tmp_path, "service", "wired-limit", "1")

    assert done.returncode == 1
    assert "macOS" in done.stderr


def test_facts_are_what_the_manager_says() -> None:
    said = "system/dev.mlxd.gateway = {\n\tstate = running\n\tpid = 412\n\tlast exit code = 70\n}"
    assert launchd.facts(said) == HostFacts(True, "running", 412, "70")
    assert launchd.facts("Could not find service") == HostFacts(False, "not loaded")
    said = "LoadState=loaded\nActiveState=failed\nMainPID=0\nExecMainStatus=78\n"
    assert systemd.facts(said) == HostFacts(True, "failed", 0, "78")
    assert not systemd.facts("LoadState=not-found\nActiveState=inactive\nMainPID=0\n").is_installed


@pytest.mark.parametrize("manager", ["launchd", "systemd"])
def test_a_dry_run_prints_everything_and_touches_nothing(tmp_path: Path, manager: str) -> None:
    done = ctl(tmp_path / "home", "service", "install", "--dry-run", "--manager", manager)

    assert done.returncode == 0, done.stderr
    assert "write " in done.stdout
    assert str(tmp_path / "home") in done.stdout
    assert ("launchctl bootstrap" if manager == "launchd" else "systemctl --user enable") in done.stdout
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("manager", ["launchd", "systemd"])
def test_a_home_that_would_add_lines_to_the_services_file_is_refused(tmp_path: Path, manager: str) -> None:
    home = tmp_path / "home\nExecStartPre=/bin/true\n#"
    done = ctl(home, "service", "install", "--dry-run", "--manager", manager)

    assert done.returncode == 1
    assert "has the control character U+000A" in done.stderr
    assert "ExecStartPre" not in done.stdout


def test_a_configuration_that_is_a_pipe_is_not_read_for_the_service(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "mlxd.toml")

    assert ctl(tmp_path, "service", "install", "--dry-run", "--manager", "systemd").returncode == 0


def test_what_is_rendered_holds_no_secret_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    for manager in ("launchd", "systemd"):
        assert "hf_secret" not in ctl(tmp_path, "service", "install", "--dry-run", "--manager", manager).stdout


def test_a_service_has_the_authorities_and_the_time_zone_with_which_it_was_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/etc/mlxd/ca.pem")
    monkeypatch.setenv("TZ", "Pacific/Auckland")
    for manager in ("launchd", "systemd"):
        shown = ctl(tmp_path, "service", "install", "--dry-run", "--manager", manager).stdout
        assert "/etc/mlxd/ca.pem" in shown
        assert "Pacific/Auckland" in shown


def test_the_machines_service_needs_a_user_of_its_own(tmp_path: Path) -> None:
    done = ctl(tmp_path, "service", "install", "--system", "--dry-run")
    assert done.returncode == 1
    assert "--run-as" in done.stderr

    done = ctl(tmp_path, "service", "install", "--system", "--run-as", "nobody-of-this-name", "--dry-run")
    assert done.returncode == 1
    assert "no user" in done.stderr


def test_removing_takes_what_installing_wrote() -> None:
    for manager in (launchd, systemd):
        written = [action.path for action in manager.install(AGENT) if isinstance(action, WriteFile)]
        assert f"remove {written[0]}" in describe(manager.uninstall(AGENT))


def _with_program(python: str) -> Service:
    return Service(
        (python, "-P", "-m", "gateway.main"), Path("/tmp/h"), "root", os.getuid(), Path("/root"), Scope.SYSTEM
    )
