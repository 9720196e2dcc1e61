"""`langchain-tests`: the standard tests of chat models, with LangChain's packages for each dialect."""

import shutil
from pathlib import Path

from tests.clients.install import pypi
from tests.conformance.conftest import run_suite
from tests.conformance.outcomes import CACHE, check, of_junit
from tests.support.daemon import DaemonProcess

PACKAGES = (
    "langchain-tests==1.1.9",
    "langchain-core==1.7.2",
    "langchain-openai==1.7.3",
    "langchain-anthropic==1.7.7",
    "langchain-ollama==1.1.0",
    "pytest-timeout==2.4.0",
)
SCRIPT = Path(__file__).parent / "scripts" / "langchain_suite.py"
# One loop for all tests: LangChain's clients outlive a test.
LOOP = ("asyncio_mode=auto", "asyncio_default_test_loop_scope=session", "asyncio_default_fixture_loop_scope=session")


def test_langchain(daemon: DaemonProcess, tmp_path: Path) -> None:
    commands = pypi("langchain", *PACKAGES, cache=CACHE)
    report = tmp_path / "report.xml"
    options = ["-q", "-p", "no:cacheprovider", "--timeout", "300", f"--junitxml={report}", f"--rootdir={tmp_path}"]
    options += [word for setting in LOOP for word in ("-o", setting)]
    # Beside this repository's settings of pytest it would run with them.
    suite = shutil.copy(SCRIPT, tmp_path)
    ran = run_suite([commands / "pytest", *options, suite], tmp_path, {"MLXD_URL": daemon.url})

    assert report.exists(), ran.stdout + ran.stderr
    check("langchain", PACKAGES[0], of_junit(report))
