"""`deploy/setup.sh` on machines whose Python is too old, with what needs no download.

The scratch checkout has no dependencies and a build backend of its own; the old interpreter, its pip and uv are real.
"""

import os
import shutil
import stat
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.scale import patient

ROOT = Path(__file__).parents[2]
UV = Path(sys.prefix) / "bin" / "uv"
PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "mlxd"
version = "0"
requires-python = ">=3.11"
[project.optional-dependencies]
dev = []
"""
BACKEND = """
import zipfile
def build_editable(folder, settings=None, metadata=None):
    name = "mlxd-0-py3-none-any.whl"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        info = "mlxd-0.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\\nName: mlxd\\nVersion: 0\\nProvides-Extra: dev\\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(f"{info}/RECORD", "")
    return name
"""


@pytest.fixture(scope="module")
def old_python() -> Path:
    """A real interpreter before 3.11, as a Mac's 3.9 is, with its pip."""
    folders = [*map(Path, os.get_exec_path()), *sorted(Path.home().glob(".pyenv/versions/*/bin"))]
    names = [folder / name for name in ("python3.9", "python3.10") for folder in folders]
    for path in names:
        if path.is_file() and "shims" not in path.parts:
            command = [path, "-c", "import pip, sys; sys.exit(sys.version_info >= (3, 11))"]
            if subprocess.run(command, capture_output=True).returncode == 0:
                return path
    pytest.skip("there is no interpreter before 3.11 with pip on this machine")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout in which setup needs nothing of an index."""
    folder = tmp_path / "mlxd"
    for part in ("vision", "audio"):
        (folder / "worker" / part).mkdir(parents=True)
        (folder / "worker" / part / "requirements.txt").touch()
    (folder / "pyproject.toml").write_text(PYPROJECT)
    (folder / "backend.py").write_text(BACKEND)
    shutil.copytree(ROOT / "deploy", folder / "deploy", ignore=shutil.ignore_patterns("demo*", "web", "node_modules"))
    return folder


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """A folder of wheels in which uv is one that starts the real uv."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    with zipfile.ZipFile(folder / "uv-0-py3-none-any.whl", "w") as wheel:
        script = zipfile.ZipInfo("uv-0.data/scripts/uv")
        script.external_attr = (stat.S_IFREG | 0o755) << 16
        wheel.writestr(script, f'#!/bin/sh\necho "$@" >>"{tmp_path}/uv.log"\nexec "{UV}" "$@"\n')
        wheel.writestr("uv-0.dist-info/METADATA", "Metadata-Version: 2.1\nName: uv\nVersion: 0\n")
        wheel.writestr("uv-0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("uv-0.dist-info/RECORD", "")
    return folder


Setup = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def setup(tmp_path: Path, checkout: Path, old_python: Path) -> Setup:
    """`setup.sh` with an old python3 first on the path, and no uv on it."""
    bin = tmp_path / "bin"
    bin.mkdir()
    (bin / "python3").symlink_to(old_python)
    # A folder of the newer one, without its other programs.
    (tmp_path / "newer").mkdir()
    (tmp_path / "newer" / "python3.11").symlink_to(Path(sys.executable).resolve())

    def run(**env: str) -> subprocess.CompletedProcess[str]:
        clean = {
            "PATH": f"{bin}:{tmp_path / 'newer'}:/usr/bin:/bin",
            "HOME": str(tmp_path),
            "PIP_CONFIG_FILE": os.devnull,
        }
        clean |= {"PIP_NO_INDEX": "1", "UV_PYTHON_DOWNLOADS": "never", "UV_OFFLINE": "1", "UV_NO_CONFIG": "1"}
        command = ["sh", "deploy/setup.sh", "python3", ".venv", "dev"]
        return subprocess.run(
            command, cwd=checkout, env=clean | env, capture_output=True, text=True, timeout=patient(60)
        )

    return run


@pytest.mark.skipif(not UV.exists(), reason="uv is not in the environment of the tests")
def test_an_old_python_fetches_uv_which_finds_a_newer_one(
    setup: Setup, checkout: Path, index: Path, tmp_path: Path
) -> None:
    done = setup(PIP_FIND_LINKS=str(index))

    assert done.returncode == 0, done.stderr
    assert "is too old; fetching uv, which finds or brings a newer one" in done.stdout
    assert done.stdout.endswith("mlxd: .venv is ready\n")
    assert (checkout / ".cache" / "uv" / "bin" / "uv").exists()
    version = subprocess.run([checkout / ".venv" / "bin" / "python", "--version"], capture_output=True, text=True)
    assert version.stdout >= "Python 3.11"
    # The next time nothing is fetched, and the environment is kept.
    asked = (tmp_path / "uv.log").read_text()
    assert "venv --quiet --python >=3.11,<3.14 .venv" in asked
    again = setup()
    assert again.returncode == 0, again.stderr
    assert "fetching" not in again.stdout
    assert (tmp_path / "uv.log").read_text().count("venv --quiet") == 1


def test_without_uv_and_a_network_one_sentence_says_what_to_do(setup: Setup, checkout: Path) -> None:
    done = setup()

    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("mlxd: Python 3.")
    assert "is too old, and its pip cannot fetch uv: install Python 3.11 or newer" in last
    assert not (checkout / ".venv").exists()


@pytest.mark.skipif(not UV.exists(), reason="uv is not in the environment of the tests")
def test_where_uv_may_not_download_a_python_one_sentence_says_what_to_do(
    setup: Setup, checkout: Path, index: Path, tmp_path: Path
) -> None:
    done = setup(
        PIP_FIND_LINKS=str(index), PATH=f"{tmp_path / 'bin'}:/usr/bin:/bin", UV_PYTHON_PREFERENCE="only-managed"
    )

    assert done.returncode == 1
    assert (
        "uv could not create .venv (see above); if it cannot download Python: install" in done.stderr.splitlines()[-1]
    )
