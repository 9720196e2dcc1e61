import os
from pathlib import Path

import pytest

from gateway.rundir import HomeUnusable, RunDir


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
