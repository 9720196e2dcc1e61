"""Distributions of mlxd: their contents, and that they install and serve from an environment with nothing else."""

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Callable
from email.parser import Parser
from pathlib import Path

import httpx2
import pytest

from protocol import __version__
from tests.support.daemon import DaemonProcess
from tests.support.scale import patient

ROOT = Path(__file__).parents[2]
PACKAGES = ("gateway", "worker", "protocol")
EXTRA = "[cpu]" if sys.platform == "linux" else ""
INSTALL_S = patient(500)
is_slow = pytest.mark.skipif("MLXD_TEST_DIST" not in os.environ, reason="installs all of mlxd: make test-dist")


def test_the_wheel_has_each_file_of_the_packages_the_page_and_the_demo_model() -> None:
    from hatchling.builders.wheel import WheelBuilder

    files = {file.distribution_path for file in WheelBuilder(str(ROOT)).recurse_included_files()}
    ours = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and not {"__pycache__", "node_modules"} & set(path.parts)
    }

    # One that .gitignore names, such as a folder `dist`, is left out in silence.
    assert ours - files == set()
    assert files - ours == set()
    for name in ("worker/demo_model/model.safetensors", "gateway/web/page/index.html"):
        assert name in files


def test_the_project_and_its_packages_have_one_version() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == __version__


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a wheel and an sdist, as `make dist` builds them."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=patient(120))
    return folder


def run(*words: str | Path, **env: str) -> str:
    """The output of a command, for which there is no compiler."""
    done = subprocess.run(
        [str(word) for word in words],
        env=os.environ | {"CC": "false", "CXX": "false", "PIP_DISABLE_PIP_VERSION_CHECK": "1"} | env,
        capture_output=True, text=True, timeout=INSTALL_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def by_pip(what: str, folder: Path) -> Path:
    run(sys.executable, "-m", "venv", folder / "env")
    run(folder / "env" / "bin" / "python", "-m", "pip", "install", "--quiet", "--prefer-binary", what)
    return folder / "env" / "bin"


def by_uv(what: str, folder: Path) -> Path:
    uv = shutil.which("uv") or Path(sys.prefix) / "bin" / "uv"
    env = {"UV_TOOL_DIR": str(folder / "tools"), "UV_TOOL_BIN_DIR": str(folder / "bin")}
    run(uv, "tool", "install", "--quiet", "--python", sys.executable, what, **env)
    return folder / "bin"


def by_pipx(what: str, folder: Path) -> Path:
    run(sys.executable, "-m", "venv", folder / "pipx")
    run(folder / "pipx" / "bin" / "python", "-m", "pip", "install", "--quiet", "pipx>=1.18,<2")
    env = {"PIPX_HOME": str(folder / "home"), "PIPX_BIN_DIR": str(folder / "bin")}
    # What it is given is one file: an extra of one is named by its project.
    run(folder / "pipx" / "bin" / "pipx", "install", "--python", sys.executable, what, **env)
    return folder / "bin"


@is_slow
@pytest.mark.parametrize(("install", "kind"), [(by_uv, "whl"), (by_pip, "whl"), (by_pipx, "whl"), (by_pip, "tar.gz")])
def test_a_distribution_installs_and_serves_the_demo_model_and_the_page(
    dist: Path, tmp_path: Path, run_dir: Path, install: Callable[[str, Path], Path], kind: str
) -> None:
    [file] = dist.glob(f"*.{kind}")
    bin = install(f"mlxd{EXTRA} @ {file.as_uri()}" if install is not by_pipx else f"{file}{EXTRA}", tmp_path)

    assert run(bin / "mlxctl", "version").startswith("mlxctl ")
    with DaemonProcess(run_dir, "--port", "0", program=bin / "mlxd") as daemon:
        question = {"model": "demo", "messages": [{"role": "user", "content": "Who are you?"}]}
        answer = daemon.client.post("/v1/chat/completions", json=question, timeout=patient(60)).json()
        assert "demo model of mlxd" in answer["choices"][0]["message"]["content"]
        page = httpx2.get(f"{daemon.url}/ui/")
        assert (page.status_code, page.headers["content-type"].split(";")[0]) == (200, "text/html")
        # From where no checkout is.
        command = Path(f"/proc/{daemon.process.pid}/cmdline")
        assert not command.exists() or str(tmp_path) in command.read_text()
    # The environment that a service would be started from.
    plan = run(bin / "mlxctl", "service", "install", "--dry-run", MLXD_HOME=str(run_dir))
    [link] = [line for line in plan.splitlines() if line.startswith(f"link {run_dir}/current")]
    environment = Path(link.split(" to ")[-1].strip())
    assert (environment / "bin" / "python3").exists()
    assert str(tmp_path) in str(environment)


@is_slow
def test_both_say_the_version_and_the_sdist_has_what_builds_it(dist: Path) -> None:
    [wheel], [sdist] = dist.glob("*.whl"), dist.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = Parser().parsestr(archive.read(name).decode())
        assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}

    assert (metadata["Name"], wheel.name.split("-")[1]) == ("mlxd", metadata["Version"])
    assert metadata["License-Expression"] == "Apache-2.0"
    assert {"pyproject.toml", "README.md", "LICENSE", "Makefile", "deploy/setup.sh"} <= names
