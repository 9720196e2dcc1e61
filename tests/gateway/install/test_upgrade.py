import fcntl
import hashlib
import json
import os
import pwd
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gateway.failed import Failed
from gateway.install import launchd, releases, systemd
from gateway.install.description import Link, Scope, Service
from gateway.install.executor import RealMachine, ServiceFailed, carry_out, describe
from gateway.install.fetch import NoSource, Source, check, install, source
from gateway.install.releases import (
    Owner,
    Release,
    Releases,
    check_writers,
    extra,
    fingerprint,
    foreign,
    launcher,
    version_of,
)
from gateway.install.upgrade import Seen, Upgrade, Wanted, locked
from tests.support.ctl import ctl
from tests.support.users import SERVICE, as_root
from tests.support.wheel import build_wheel


class Machine(RealMachine):
    """Files are real; commands are only remembered, but for `venv`, which makes an environment of `version`."""

    def __init__(self, version: str = "2.0") -> None:
        self.version = version
        self.did: list[str] = []
        self.users: list[str] = []
        self.fails_on = ""
        self.now = 0.0

    def run(self, argv: tuple[str, ...], timeout_s: float = 0, user: str = "") -> tuple[int, str]:
        self.did.append(" ".join(argv))
        self.users.append(user)
        if argv[1:3] == ("-m", "venv"):
            make_env(Path(argv[3]), self.version)
        if self.fails_on and self.fails_on in self.did[-1]:
            return 2, "mlxd.toml:3: unknown key"
        return (3, "inactive") if "is-active" in argv else (0, "")

    def pause(self) -> None:
        self.now += 1.0


@dataclass
class Observer:
    """A daemon that runs from whatever is current, with a new pid each time the link moves."""

    known: Releases
    broken: Sequence[Path] = ()
    silent: Sequence[Path] = ()
    tells: str = ""
    rolled: list[Path] = field(default_factory=list[Path])
    used: set[Path] = field(default_factory=set[Path])

    def look(self) -> Seen | None:
        env = self.known.current
        assert env is not None
        if env in self.silent:
            return None
        return Seen(hash(env), env, "model a is backoff" if env in self.broken else "")

    def complete(self) -> None:
        if self.tells:
            raise Failed(self.tells)

    def roll(self, env: Path) -> list[str]:
        self.rolled.append(env)
        return ["a"]

    def in_use(self) -> set[Path]:
        return self.used


def make_env(env: Path, version: str, worker: str = "x = 1\n") -> Path:
    site = env / "lib" / "python3.11" / "site-packages"
    for package in ("worker", "protocol"):
        (site / package).mkdir(parents=True)
        (site / package / "__init__.py").write_text(f'__version__ = "{version}"\n{worker}')
    (site / f"mlxd-{version}.dist-info").mkdir()
    return env


class Place:
    """A service of version 1.0 in a folder, and what changes it."""

    def __init__(self, folder: Path) -> None:
        self.service = Service(("x",), folder / "home", "u", 501, folder, Scope.USER)
        self.known = Releases(self.service.prefix)
        self.first = make_env(folder / "venv", "1.0")
        self.machine = Machine()
        carry_out(self.known.adopt(self.first, Owner(str(self.service.home), "u")), self.machine)
        self.observer = Observer(self.known)
        self.told: list[str] = []

    @property
    def change(self) -> Upgrade:
        return Upgrade(
            self.service, systemd, self.machine, self.observer, self.told.append, clock=lambda: self.machine.now
        )

    def wanted(self, keep: int = 3, deadline_s: float = 30.0) -> Wanted:
        return Wanted(Source("mlxd", "/wheels"), Path("/usr/bin/python3"), None, keep, deadline_s)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_the_new_version_is_tried_before_the_link_moves_and_the_daemon_hands_over(place: Place) -> None:
    env = place.change.run(place.wanted())

    did = place.machine.did
    order = [next(i for i, line in enumerate(did) if word in line) for word in ("-m pip", "config check", "SIGUSR2")]
    assert order == sorted(order)
    assert f"MLXD_HOME={place.service.home} {env}/bin/python3" in did[order[1]]
    assert (place.known.current, place.known.previous) == (env, place.first)
    assert (version_of(env), env.name) == ("2.0", "1")
    assert releases.read(env) == Release("2.0", "mlxd", "/wheels")


@pytest.mark.parametrize("step", ["-m venv", "-m pip", "config check", "worker.smoke"])
def test_a_version_that_cannot_be_installed_or_tried_changes_nothing(place: Place, step: str) -> None:
    place.machine.fails_on = step

    with pytest.raises(ServiceFailed, match="unknown key"):
        place.change.run(place.wanted())

    assert place.known.current == place.first
    assert place.known.complete() == []
    assert not place.known.fresh().parent.exists() or not any(place.known.folder.iterdir())
    assert not any("systemctl" in line for line in place.machine.did)


@pytest.mark.parametrize("kind", ["broken", "silent"])
def test_a_version_that_is_not_ready_in_time_is_given_up_for_the_one_before(place: Place, kind: str) -> None:
    setattr(place.observer, kind, [place.known.fresh()])

    with pytest.raises(ServiceFailed, match=r"rolled back to 1\.0"):
        place.change.run(place.wanted())

    assert place.known.current == place.first
    assert (place.known.previous, place.known.complete()) == (None, [])
    assert any("--signal=SIGKILL" in line for line in place.machine.did)
    assert place.machine.did[-1].endswith("start mlxd.service")


def test_a_version_that_generates_nothing_is_given_up(place: Place) -> None:
    place.observer.tells = "demo: no token"

    with pytest.raises(ServiceFailed, match="no token"):
        place.change.run(place.wanted())

    assert place.known.current == place.first


def test_workers_are_kept_when_their_code_is_the_same_and_started_anew_when_it_is_not(place: Place) -> None:
    same = place.change.run(place.wanted())
    assert fingerprint(same) == fingerprint(place.first)
    assert place.observer.rolled == []

    (same / "lib/python3.11/site-packages/worker/__init__.py").write_text("x = 2\n")
    other = place.change.run(place.wanted())
    assert place.observer.rolled == [other]


def test_an_editable_installation_does_not_tell_what_its_workers_run(tmp_path: Path) -> None:
    assert fingerprint(tmp_path) == ""


def test_a_rollback_goes_to_the_version_before_and_a_second_one_back(place: Place) -> None:
    with pytest.raises(ServiceFailed, match="no version to roll back to"):
        place.change.back(30.0)
    env = place.change.run(place.wanted())

    assert place.change.back(30.0) == place.first
    assert (place.known.current, place.known.previous) == (place.first, env)
    assert place.change.back(30.0) == env


def test_old_versions_go_but_never_one_that_is_linked_or_run_from(place: Place) -> None:
    envs = [place.change.run(place.wanted(keep=2)) for _ in range(2)]
    place.observer.used = {envs[0]}
    envs += [place.change.run(place.wanted(keep=2)) for _ in range(3)]

    assert [env.name for env in envs] == ["1", "2", "3", "4", "5"]
    assert [env.name for env in place.known.complete()] == ["1", "4", "5"]


def test_fewer_versions_than_may_stay_all_stay(place: Place) -> None:
    envs = [place.change.run(place.wanted(keep=5)) for _ in range(4)]

    assert place.known.complete() == envs


def test_what_was_never_completed_goes_with_the_next_upgrade(place: Place) -> None:
    make_env(place.known.folder / "7", "3.0")

    env = place.change.run(place.wanted())

    assert env.name == "8"
    assert not (place.known.folder / "7").exists()


def test_one_change_at_a_time(place: Place) -> None:
    with locked(place.service.prefix), pytest.raises(ServiceFailed, match="in progress"):
        place.change.run(place.wanted())
    with (place.service.prefix / "versions.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_daemon_that_runs_from_elsewhere_is_not_taken_for_the_new_one(place: Place) -> None:
    @dataclass
    class Elsewhere(Observer):
        asked: int = 0

        def look(self) -> Seen:
            self.asked += 1
            return Seen(self.asked, place.first)

    place.observer = Elsewhere(place.known)
    with pytest.raises(ServiceFailed, match="runs from"):
        place.change.run(place.wanted())


def test_the_launcher_runs_the_linked_environment_by_its_real_path(tmp_path: Path) -> None:
    env = tmp_path / "versions" / "1"
    (env / "bin").mkdir(parents=True)
    (env / "bin" / "python3").write_text('#!/bin/sh\necho "$0" "$@"\n')
    (env / "bin" / "python3").chmod(0o755)
    machine = RealMachine()
    assert machine.run(launcher(tmp_path))[0] == 78

    machine.link(tmp_path / "current", env)

    status, said = machine.run((*launcher(tmp_path), "--launchd"))
    assert (status, said) == (0, f"{env.resolve()}/bin/python3 -P -m gateway.main --launchd\n")


def test_a_link_is_replaced_in_one_step(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        carry_out([Link(tmp_path / "current", tmp_path / name)], RealMachine())
        assert (tmp_path / "current").resolve().name == name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "current"]


def test_a_source_is_a_file_an_address_or_a_version_from_somewhere(tmp_path: Path) -> None:
    wheel = tmp_path / "mlxd-2.0-py3-none-any.whl"
    wheel.touch()
    assert source(str(wheel), None, "", "cpu") == Source(f"mlxd[cpu] @ file://{wheel}")
    assert source(str(tmp_path), None, "", "") == Source(f"mlxd @ file://{tmp_path}", is_built=True)
    assert source("2.0", str(tmp_path), "", "") == Source("mlxd==2.0", str(tmp_path))
    assert source(None, None, "https://index", "cuda") == Source("mlxd[cuda]", "https://index")
    assert source("git+https://host/mlxd", None, "", "cpu").what == "mlxd[cpu] @ git+https://host/mlxd"
    with pytest.raises(NoSource, match="no source is given"):
        source("2.0", None, "", "")
    with pytest.raises(NoSource, match="there is no"):
        source("./nothing.whl", None, "", "")


@pytest.mark.parametrize("address", ["http://wheels.example/simple", "ftp://127.0.0.1/x", "http://127.0.0.1.example/x"])
def test_code_that_others_on_the_way_could_change_is_refused(tmp_path: Path, address: str) -> None:
    for target, find, remembered in (("2.0", address, ""), ("2.0", None, address), (f"{address}/mlxd.whl", None, "")):
        with pytest.raises(NoSource, match="https"):
            source(target, find, remembered, "")
    for good in ("https://wheels.example/simple", "http://localhost:8080/simple", "http://[::1]/simple"):
        assert source("2.0", good, "", "").find == good
    with pytest.raises(NoSource, match="no such folder"):
        source("2.0", str(tmp_path / "nothing"), "", "")


def test_what_is_installed_is_built_nowhere_and_has_the_hashes_of_its_folders_lock(tmp_path: Path) -> None:
    env, base = Path("/v/1"), Path("/usr/bin/python3")
    for uv in (None, "/bin/uv"):
        run = install(env, source("2.0", str(tmp_path), "", "cpu"), base, uv)[1]
        assert run.argv[-6:] == (
            "--only-binary",
            ":all:",
            "--no-index",
            "--find-links",
            str(tmp_path),
            "mlxd[cpu]==2.0",
        )
    (tmp_path / "requirements.lock").touch()
    locked = source("2.0", str(tmp_path), "", "cpu")
    assert locked.version == "2.0"
    assert install(env, locked, base, None)[1].argv[-3:] == ("--require-hashes", "-r", f"{tmp_path}/requirements.lock")
    # A checkout's mlxd is built, and nothing else.
    argv = install(env, source(str(tmp_path), None, "", ""), base, None)[1].argv
    assert argv[-5:] == ("--only-binary", ":all:", "--no-binary", "mlxd", f"mlxd @ file://{tmp_path}")


def test_a_wheel_of_another_content_than_the_locks_is_not_installed(tmp_path: Path) -> None:
    build_wheel(tmp_path, "9.9.1")
    (wheel,) = tmp_path.glob("*.whl")
    lock = tmp_path / "requirements.lock"
    for digest, is_good in ((hashlib.sha256(wheel.read_bytes()).hexdigest(), True), ("0" * 64, False)):
        lock.write_text(f"mlxd==9.9.1 --hash=sha256:{digest}\n")
        env = tmp_path / "versions" / str(is_good)
        actions = install(env, source("9.9.1", str(tmp_path), "", ""), Path(sys.executable).resolve(), None)
        if is_good:
            carry_out(actions, RealMachine())
            assert version_of(env) == "9.9.1"
        else:
            with pytest.raises(ServiceFailed, match="HASHES"):
                carry_out(actions, RealMachine())


@as_root
def test_what_is_new_is_tried_as_the_services_user_and_without_roots_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_ROOT", "1")
    service = Service(("/x",), tmp_path, "nobody", pwd.getpwnam("nobody").pw_uid, tmp_path, Scope.SYSTEM)
    runs = check(tmp_path, service)
    assert [run.user for run in runs] == ["nobody"] * len(runs)
    assert "run as nobody" in describe(runs)

    status, said = RealMachine().run(("/bin/sh", "-c", "id -u; id -G; umask; pwd; env"), user="nobody")

    user = pwd.getpwnam("nobody")
    assert status == 0
    assert said.split()[:4] == [str(user.pw_uid), str(user.pw_gid), "0077", "/"]
    assert "SECRET_OF_ROOT" not in said


@as_root
def test_an_environment_that_the_services_user_can_change_is_not_run_by_root(tmp_path: Path) -> None:
    env = tmp_path / "env"
    make_env(env, "2.0")
    (env / "bin").mkdir(exist_ok=True)
    for folder in (tmp_path, *tmp_path.parents[:-2]):
        folder.chmod(0o755)
    assert check_writers(env, SERVICE) == ""
    (site,) = env.glob("lib/python3*/site-packages")
    os.chown(site, SERVICE, SERVICE)
    with pytest.raises(Failed, match="service's user"):
        check_writers(env, SERVICE)
    assert f"can be changed by user {SERVICE}" in check_writers(env, SERVICE + 1)
    os.chown(site, 0, 0)
    env.chmod(0o777)
    with pytest.raises(Failed, match="every user"):
        check_writers(env, SERVICE)


def test_uv_installs_when_it_is_there_and_an_offline_folder_is_the_only_source() -> None:
    env, base = Path("/v/1"), Path("/usr/bin/python3")
    with_uv = [" ".join(run.argv) for run in install(env, Source("mlxd", "/w"), base, "/bin/uv")]
    assert with_uv[0] == "/bin/uv venv --quiet --python /usr/bin/python3 /v/1"
    assert with_uv[1].endswith("--python /v/1/bin/python3 --only-binary :all: --no-index --find-links /w mlxd")
    with_pip = [" ".join(run.argv) for run in install(env, Source("mlxd", "https://i"), base, None)]
    assert with_pip[1].endswith("--no-input --only-binary :all: --index-url https://i mlxd")


def test_another_package_managers_installation_is_left_to_it() -> None:
    assert "brew upgrade" in foreign(Path("/opt/homebrew/Cellar/mlxd/0.1.0/libexec"))
    assert foreign(Path("/home/u/venv")) == ""


def test_the_backend_of_mlx_is_kept() -> None:
    assert extra({"mlx", "mlx-cpu"}, "linux") == "cpu"
    assert extra({"mlx", "mlx-cuda-13"}, "linux") == "cuda"
    assert extra({"mlx"}, "darwin") == ""


def test_launchd_ends_and_starts_a_daemon_that_did_not_become_ready(place: Place) -> None:
    carry_out(launchd.revive(place.service), place.machine)

    assert place.machine.did[-1] == "launchctl kickstart -k gui/501/dev.mlxd.gateway"


def test_pip_installs_a_wheel_into_an_environment_of_its_own(tmp_path: Path) -> None:
    build_wheel(tmp_path / "wheels", "9.9.1")
    env = tmp_path / "versions" / "1"
    wanted = source("9.9.1", str(tmp_path / "wheels"), "", "cpu")

    carry_out(install(env, wanted, Path(sys.executable).resolve(), None), RealMachine())

    assert version_of(env) == "9.9.1"
    assert RealMachine().run((str(env / "bin" / "mlxctl"), "version")) == (0, "mlxctl 9.9.1\n")
    assert fingerprint(env)


def test_an_upgrade_without_a_service_says_what_to_do_first(tmp_path: Path) -> None:
    done = ctl(tmp_path, "service", "upgrade", "2.0", "--from", str(tmp_path))

    assert done.returncode == 1
    assert "mlxctl service install" in done.stderr


def test_a_dry_upgrade_prints_the_whole_way_and_touches_nothing(tmp_path: Path) -> None:
    (tmp_path / "current").symlink_to(sys.prefix)

    done = ctl(tmp_path, "service", "upgrade", "2.0", "--from", str(tmp_path), "--dry-run")

    assert done.returncode == 0, done.stderr
    assert f"--only-binary :all: --no-index --find-links {tmp_path} mlxd" in done.stdout
    assert f"link {tmp_path}/current to {tmp_path}/versions/1" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["current"]

    told = json.loads(ctl(tmp_path, "service", "upgrade", "2.0", "--from", str(tmp_path), "--dry-run", "--json").stdout)
    assert told["done"] is False
    link = {"type": "Link", "path": f"{tmp_path}/current", "target": f"{tmp_path}/versions/1"}
    assert link in told["actions"]
