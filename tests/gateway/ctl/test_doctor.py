import json
from pathlib import Path

import pytest

from gateway.control_types import Probe
from gateway.ctl.doctor import checks as doctor
from gateway.ctl.doctor.checks import DoctorFinding
from gateway.ctl.doctor.machine_facts import machine
from protocol.sockets import IPC_PATH_MAX
from tests.gateway.ctl.test_status import free_port
from tests.support.ctl import ctl
from tests.support.daemon import DaemonProcess, write_config

GIB = 1024**3
HOME = Path("/h")


@pytest.mark.parametrize(
    ("finding", "level", "advice"),
    [
        (doctor.versions({"mlx": "1", "mlx-lm": "2"}), "ok", ""),
        (doctor.versions({"mlx": None}), "bad", "install"),
        (doctor.configuration(HOME, "mlxd.toml:3: unknown key"), "bad", "config check"),
        (doctor.home(HOME, None, -1, 5), "ok", ""),
        (doctor.home(HOME, 0o700, 5, 5), "ok", ""),
        (doctor.home(HOME, 0o755, 5, 5), "warn", "chmod 700 /h"),
        (doctor.home(HOME, 0o700, 0, 5), "bad", "chown"),
        (doctor.socket_paths(HOME / "run", HOME / "run/admin.sock"), "ok", ""),
        (doctor.socket_paths(Path("/" + "h" * 110), HOME / "run/admin.sock"), "bad", "MLXD_HOME"),
        (doctor.socket_paths(HOME / "run", Path("/" + "h" * 110)), "bad", "MLXD_HOME"),
        (doctor.disk(100 * GIB), "ok", ""),
        (doctor.disk(5 * GIB), "warn", "cache.disk"),
        (doctor.disk(1000), "bad", "cache clear"),
        (doctor.vision("0.7.10", ["m"]), "ok", ""),
        (doctor.vision(None, ["m"]), "warn", "mlxctl setup vision"),
        (doctor.vision(None, []), "ok", ""),
        (doctor.media({"m": (("image",), "")}), "ok", ""),
        (doctor.media({"m": ((), "mlx-vlm is not installed")}), "warn", "mlx-vlm is not installed"),
        (doctor.port(8484, is_taken=False, is_ours=False), "ok", ""),
        (doctor.port(8484, is_taken=True, is_ours=True), "ok", ""),
        (doctor.port(8484, is_taken=True, is_ours=False), "bad", "lsof"),
        (doctor.files(-1), "ok", ""),
        (doctor.files(8192), "ok", ""),
        (doctor.files(256), "warn", "8192"),
        (doctor.wired_limit("0\n", 64 * GIB), "ok", ""),
        (doctor.wired_limit(str(48 * 1024), 64 * GIB), "ok", ""),
        (doctor.wired_limit(str(62 * 1024), 64 * GIB), "warn", "lower"),
        (doctor.wired_limit(None, 64 * GIB), "skip", ""),
        (doctor.sleep(" standby 0\n sleep                0 (imposed by 81)\n disksleep 10\n"), "ok", ""),
        (doctor.sleep(" disksleep 10\n sleep 15\n"), "warn", "pmset"),
        (doctor.sleep(None), "skip", ""),
        (doctor.daemon("1", "1"), "ok", ""),
        (doctor.daemon("1", "2"), "warn", "restart"),
        (doctor.daemon(None, "2"), "warn", "serve"),
        (doctor.livez(200, "http://x"), "ok", ""),
        (doctor.livez(None, "http://x"), "bad", "logs"),
        (doctor.completion([Probe("m", True, "ready", 100, ""), Probe("n", True, "busy", 9000, "")]), "ok", ""),
        (doctor.completion([Probe("m", True, "ready", 9000, "")]), "warn", "requests"),
        (doctor.completion([Probe("m", False, "failed", 1, "it is gone")]), "bad", "restart m"),
    ],
)
def test_each_fact_is_judged_and_what_is_wrong_comes_with_advice(
    finding: DoctorFinding, level: str, advice: str
) -> None:
    assert finding.level == level
    assert advice in finding.advice
    assert bool(finding.advice) == (level in ("warn", "bad"))


def test_on_a_mac_the_wired_limit_and_the_sleep_are_asked_for(tmp_path: Path) -> None:
    asked: list[str] = []

    def say(argv: tuple[str, ...]) -> str:
        asked.append(argv[0])
        return "0" if argv[0].endswith("sysctl") else " sleep 10\n"

    found = {finding.name: finding.level for finding in machine(tmp_path, say, "darwin")}

    assert asked == ["/usr/sbin/sysctl", "/usr/bin/pmset"]
    assert (found["wired limit"], found["sleep"]) == ("ok", "warn")


@pytest.mark.parametrize("too_long", [0, 1])
def test_a_home_is_judged_by_its_longest_socket_path(tmp_path: Path, too_long: int) -> None:
    longest = IPC_PATH_MAX - len("/run/admin.sock") + too_long
    home = Path("/tmp") / ("h" * (longest - len("/tmp/")))
    (found,) = [finding for finding in machine(home, lambda _: None) if finding.name == "sockets"]

    assert found.level == ("bad" if too_long else "ok")
    assert ("admin.sock" in found.text) == bool(too_long)


def test_a_running_daemon_is_asked_for_one_token(tmp_path: Path) -> None:
    write_config(tmp_path)
    path = tmp_path / "mlxd.toml"
    path.write_text(path.read_text().replace("port = 0", f"port = {free_port()}"))
    with DaemonProcess(tmp_path) as daemon:
        idle = _examine(tmp_path)
        assert daemon.complete().status_code == 200
        busy = _examine(tmp_path)

    assert idle["completion"] == "skip"
    assert {name: busy[name] for name in ("daemon", "livez", "completion", "port")} == {
        "daemon": "ok",
        "livez": "ok",
        "completion": "ok",
        "port": "ok",
    }


def test_a_bad_configuration_is_the_exit_status(tmp_path: Path) -> None:
    (tmp_path / "mlxd.toml").write_text("[server]\nprot = 1\n")
    done = ctl(tmp_path, "doctor")

    assert done.returncode == 1
    assert "mlxd.toml:2: unknown key 'prot'" in done.stdout
    assert "mlxctl config check" in done.stdout


def _examine(home: Path) -> dict[str, str]:
    return {finding["name"]: finding["level"] for finding in json.loads(ctl(home, "doctor", "--json").stdout)}
