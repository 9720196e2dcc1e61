import hashlib
import re
import shutil
import subprocess
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from gateway.service import launchd
from gateway.service.description import Scope, Service
from tests.support.scale import patient

FOLDER = Path(__file__).parents[2] / "deploy" / "homebrew"
ROOT = FOLDER.parents[1]


def update(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", str(FOLDER / "update.sh"), *words], capture_output=True, text=True, timeout=patient(30)
    )


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """The start of an sdist."""
    path = tmp_path / "mlxd-0.2.0.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        tar.add(ROOT / "pyproject.toml", "mlxd-0.2.0/pyproject.toml")
    return path


@pytest.fixture
def wheel(tmp_path: Path) -> str:
    """A wheel of this project's metadata as the build backend writes them, of another version."""
    from hatchling.metadata.core import ProjectMetadata
    from hatchling.metadata.spec import construct_metadata_file_2_4
    from hatchling.plugin.manager import PluginManager

    metadata = construct_metadata_file_2_4(ProjectMetadata(str(ROOT), PluginManager()))
    path = tmp_path / "mlxd-0.2.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("mlxd-0.2.0.dist-info/METADATA", re.sub("\nVersion: .*", "\nVersion: 0.2.0", metadata))
    return str(path)


def test_the_formula_has_the_wheels_metadata_and_the_checksum_of_what_its_address_gives(
    archive: Path, wheel: str
) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    done = update(wheel, archive.as_uri(), "https://example.com/mlxd")

    assert done.returncode == 0, done.stderr
    assert "@" not in re.sub(r"python@3|@\w+\.", "", done.stdout)
    assert f'sha256 "{hashlib.sha256(archive.read_bytes()).hexdigest()}"' in done.stdout
    assert f'url "{archive.as_uri()}"' in done.stdout
    assert 'version "0.2.0"' in done.stdout
    assert f'license "{project["license"]}"' in done.stdout
    assert f'desc "{project["description"]}"' in done.stdout
    # brew audit's rules for a description.
    assert len(project["description"]) <= 80
    assert not project["description"].startswith(("A ", "An ", "The "))
    assert not project["description"].endswith(".")


def test_no_formula_is_made_of_what_is_not_there_or_is_something_else(
    archive: Path, wheel: str, tmp_path: Path
) -> None:
    assert update(wheel, (tmp_path / "none.tar.gz").as_uri(), "https://example.com").stdout == ""
    (tmp_path / "page.html").write_text("<html>")
    done = update(wheel, (tmp_path / "page.html").as_uri(), "https://example.com")
    assert (done.returncode, done.stdout) == (1, "")
    done = update(str(archive), archive.as_uri(), "https://example.com")
    assert (done.returncode, done.stdout) == (1, "")
    assert "is no wheel" in done.stderr


@pytest.mark.skipif(not shutil.which("ruby"), reason="needs ruby")
def test_ruby_can_read_the_formula(archive: Path, wheel: str) -> None:
    formula = update(wheel, archive.as_uri(), "https://example.com/mlxd").stdout

    done = subprocess.run(["ruby", "-wc"], input=formula, capture_output=True, text=True, timeout=patient(30))

    assert (done.stdout.strip(), done.stderr) == ("Syntax OK", "")


def test_the_formulas_service_is_that_of_our_own_description() -> None:
    service = Service(("x",), Path("/h"), "u", 501, Path("/u"), Scope.USER)
    text = (FOLDER / "mlxd.rb.in").read_text()
    plist = launchd.render(service)

    assert '"-P", "-m", "gateway.main", "--launchd"' in text
    assert "keep_alive successful_exit: false" in text
    assert "<key>SuccessfulExit</key>" in plist
    assert f"process_type :{'interactive' if '<string>Interactive</string>' in plist else '?'}" in text
