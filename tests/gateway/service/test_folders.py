"""What root makes of a service's folders, whatever the service's user has put in their place."""

import os
import pwd
from pathlib import Path

import pytest

from gateway.homefolder import FolderRefused, open_folder, private_folder
from gateway.service.description import Folder
from gateway.service.machine import RealMachine, ServiceFailed, carry_out
from tests.support.users import SERVICE, as_root, as_service, assert_untouched, precious, service_home


def mode_and_owner(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_mode & 0o777, found.st_uid


@as_root
def test_a_services_folder_is_made_for_its_user_alone_and_again_after_an_upgrade(tmp_path: Path) -> None:
    home = service_home(tmp_path) / "deeper" / ".mlxd"
    for _ in range(2):
        private_folder(home, SERVICE, SERVICE)
        private_folder(home / "logs", SERVICE, SERVICE)
    assert {mode_and_owner(path) for path in (home, home / "logs")} == {(0o700, SERVICE)}

    home.chmod(0o755)
    private_folder(home, SERVICE, SERVICE)
    assert mode_and_owner(home) == (0o700, SERVICE)


def test_a_users_own_folder_needs_no_root(tmp_path: Path) -> None:
    user = pwd.getpwuid(os.getuid())
    carry_out([Folder(tmp_path / "a" / "b", user.pw_name)], RealMachine())
    assert mode_and_owner(tmp_path / "a" / "b") == (0o700, os.getuid())


@as_root
def test_a_home_that_is_a_link_is_refused_and_what_it_leads_to_stays_as_it_is(tmp_path: Path) -> None:
    home, target = service_home(tmp_path), precious(tmp_path / "etc")
    target.chmod(0o755)
    as_service(lambda: (home / ".mlxd").symlink_to(target))

    with pytest.raises(ServiceFailed, match="symbolic link"):
        carry_out([Folder(home / ".mlxd", "nobody")], RealMachine())
    with pytest.raises(ServiceFailed, match=f"symbolic link of user {SERVICE}"):
        carry_out([Folder(home / ".mlxd" / "logs", "nobody")], RealMachine())
    assert_untouched(target)
    assert mode_and_owner(target) == (0o755, 0)


@as_root
def test_a_folder_of_another_user_is_not_given_away(tmp_path: Path) -> None:
    home = service_home(tmp_path)
    target = precious(home / ".mlxd")
    with pytest.raises(ServiceFailed, match="belongs to user 0, not"):
        carry_out([Folder(target, "nobody")], RealMachine())
    (tmp_path / "empty").mkdir(mode=0o750)
    with pytest.raises(FolderRefused, match="belongs to user 0"):
        private_folder(tmp_path / "empty", SERVICE, SERVICE)
    assert_untouched(target)
    assert mode_and_owner(tmp_path / "empty") == (0o750, 0)


@as_root
def test_root_follows_its_own_links_in_its_own_folders_only(tmp_path: Path) -> None:
    home = service_home(tmp_path)
    (tmp_path / "link").symlink_to(home)
    (tmp_path / "relative").symlink_to("link/../home")
    (home / "planted").symlink_to(tmp_path)
    for path in (tmp_path / "link", tmp_path / "relative"):
        folder = open_folder(path)
        assert os.fstat(folder).st_ino == home.stat().st_ino
        os.close(folder)
    with pytest.raises(FolderRefused, match=f"{home}/planted is a symbolic link of user {SERVICE}"):
        open_folder(home / "planted")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="symbolic links"):
        open_folder(tmp_path / "loop" / "x")
