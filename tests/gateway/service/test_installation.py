import os
from pathlib import Path

import pytest

from gateway.command_failed import CommandFailed
from gateway.service.description import SymbolicLink
from gateway.service.installer import Installation, Owner, RealMachine, carry_out, check_writers, launcher, version_of
from tests.support.users import SERVICE, as_root


def make_env(env: Path, version: str) -> Path:
    """An environment as far as the service looks at one."""
    site = env / "lib" / "python3.11" / "site-packages"
    (site / f"mlxd-{version}.dist-info").mkdir(parents=True)
    (env / "bin").mkdir()
    return env


def test_an_installation_knows_its_environment_and_owner_until_it_is_removed(tmp_path: Path) -> None:
    env, prefix = make_env(tmp_path / "env", "2.0"), tmp_path / "prefix"
    installation = Installation(prefix)
    assert (installation.environment, installation.owner, version_of(None)) == (None, None, "")

    carry_out(installation.link(env, Owner("/home/x/.mlxd", "x")), RealMachine())
    assert (installation.environment, installation.owner) == (env, Owner("/home/x/.mlxd", "x"))
    assert version_of(installation.environment) == "2.0"

    carry_out(installation.unlink(), RealMachine())
    assert (installation.environment, installation.owner) == (None, None)
    assert env.exists()


def test_the_launcher_runs_the_linked_environment_by_its_real_path(tmp_path: Path) -> None:
    env = tmp_path / "versions" / "1"
    (env / "bin").mkdir(parents=True)
    (env / "bin" / "python3").write_text('#!/bin/sh\necho "$0" "$@"\n')
    (env / "bin" / "python3").chmod(0o755)
    machine = RealMachine()
    assert machine.run(launcher(tmp_path))[0] == 78

    machine.link(tmp_path / "current", env)

    status, output = machine.run((*launcher(tmp_path), "--launchd"))
    assert (status, output) == (0, f"{env.resolve()}/bin/python3 -P -m gateway.main --launchd\n")


def test_a_link_is_replaced_in_one_step(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        carry_out([SymbolicLink(tmp_path / "current", tmp_path / name)], RealMachine())
        assert (tmp_path / "current").resolve().name == name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "current"]


@as_root
def test_an_environment_that_the_services_user_can_change_is_not_run_by_root(tmp_path: Path) -> None:
    env = make_env(tmp_path / "env", "2.0")
    for folder in (tmp_path, *tmp_path.parents[:-2]):
        folder.chmod(0o755)
    assert check_writers(env, SERVICE) == ""
    (site,) = env.glob("lib/python3*/site-packages")
    os.chown(site, SERVICE, SERVICE)
    with pytest.raises(CommandFailed, match="service's user"):
        check_writers(env, SERVICE)
    assert f"can be changed by user {SERVICE}" in check_writers(env, SERVICE + 1)
    os.chown(site, 0, 0)
    env.chmod(0o777)
    with pytest.raises(CommandFailed, match="every user"):
        check_writers(env, SERVICE)
