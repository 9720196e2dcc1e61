"""Root and the user of a service: what the one finds in the other's home."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

SERVICE = 12345
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files for others")


def service_home(tmp_path: Path) -> Path:
    """A service's, that its user can reach."""
    for folder in (tmp_path, *tmp_path.parents[:-2]):
        folder.chmod(0o755)
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, SERVICE, SERVICE)
    return home


def as_service(what: Callable[[], object]) -> None:
    """Do it in a process of the service's user."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setgroups([])
            os.setgid(SERVICE)
            os.setuid(SERVICE)
            what()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def precious(folder: Path) -> Path:
    """A folder of root's with a secret in it."""
    folder.mkdir()
    (folder / "shadow").write_text("root's")
    (folder / "shadow").chmod(0o600)
    return folder


def assert_untouched(folder: Path) -> None:
    assert [path.name for path in folder.iterdir()] == ["shadow"]
    assert {path.lstat().st_uid for path in (folder, folder / "shadow")} == {0}
    assert (folder / "shadow").read_text() == "root's"
