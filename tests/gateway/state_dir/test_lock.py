import os
from pathlib import Path

import pytest

from gateway.state_dir import HomeUnusable, RunDir


def test_the_run_folder_is_made_and_private(tmp_path: Path) -> None:
    with RunDir(tmp_path / "new" / "home") as run:
        assert run.path.stat().st_mode & 0o777 == 0o700
        assert (run.path / "lock").stat().st_mode & 0o777 == 0o600


def test_a_second_daemon_in_one_home_is_refused_by_name(tmp_path: Path) -> None:
    with RunDir(tmp_path), pytest.raises(HomeUnusable, match=rf"another mlxd \(pid {os.getpid()}\) runs in"):
        RunDir(tmp_path).__enter__()


def test_the_home_is_free_again_afterwards(tmp_path: Path) -> None:
    for _ in range(2):
        with RunDir(tmp_path):
            pass


def test_a_home_that_cannot_be_made_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(HomeUnusable, match="cannot use"):
        RunDir(tmp_path / "file" / "home").__enter__()


def test_a_home_that_another_program_has_made_is_made_private(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tmp_path.chmod(0o755)
    with RunDir(tmp_path):
        assert tmp_path.stat().st_mode & 0o777 == 0o700
    assert "mode 0755" in caplog.text


def test_a_folder_that_users_share_is_no_home_and_stays_as_it_is(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    with pytest.raises(HomeUnusable, match="users share"):
        RunDir(tmp_path).__enter__()
    assert tmp_path.stat().st_mode & 0o7777 == 0o1777
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make folders for others")
def test_the_home_of_another_user_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, 12345)
    tmp_path.chmod(0o755)
    with pytest.raises(HomeUnusable, match="belongs to user 12345, and mlxd runs as 0"):
        RunDir(tmp_path).__enter__()
    assert tmp_path.stat().st_mode & 0o777 == 0o755
    assert list(tmp_path.iterdir()) == []
