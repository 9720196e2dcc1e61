"""llama.cpp's tests of its server, for which they take mlxd: one daemon, as an external server."""

from pathlib import Path

from tests.clients.install import pypi, sdist
from tests.conformance.conftest import run_suite
from tests.conformance.outcomes import CACHE, check, known, of_junit
from tests.support.daemon import DaemonProcess

# Its sdist has the sources of llama.cpp with the tests.
SOURCE = "llama-cpp-python==0.3.36"
PACKAGES = (
    "pytest==8.3.5", "pytest-timeout==2.4.0", "pytest-xdist==3.8.0", "filelock==3.16.1", "numpy==2.2.6",
    "openai==2.14.0", "requests==2.32.5", "wget==3.2", "aiohttp==3.9.5", "prometheus-client==0.20.0",
)  # fmt: skip


def test_llama_cpp(lenient_daemon: DaemonProcess, tmp_path: Path) -> None:
    commands = pypi("llama-cpp", *PACKAGES, cache=CACHE)
    tests = sdist("llama-cpp-sdist", SOURCE, cache=CACHE) / "vendor" / "llama.cpp" / "tools" / "server" / "tests"
    absent = known("llama_cpp").not_applicable
    files = sorted(each for each in (tests / "unit").glob("test_*.py") if each.stem not in absent)
    left_out = [f"--deselect=unit/{name.replace('::', '.py::', 1)}" for name in absent if "::" in name]
    report = tmp_path / "report.xml"
    options = ["-q", "-p", "no:cacheprovider", "--timeout", "120", "-m", "not slow", f"--junitxml={report}", *left_out]
    # Nothing is started or stopped: every test asks the same server, at this port.
    env = {"DEBUG_EXTERNAL": "1", "PORT": lenient_daemon.url.rpartition(":")[2]}
    ran = run_suite([commands / "pytest", *options, *files], tests, env)

    assert report.exists(), ran.stdout + ran.stderr
    check("llama_cpp", SOURCE, of_junit(report))
