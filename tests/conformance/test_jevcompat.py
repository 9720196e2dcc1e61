"""`jevcompat`: the decisions of TypeSafe's System One API, by its written specification."""

import json
from pathlib import Path

from tests.clients.install import pypi
from tests.conformance.conftest import run_suite
from tests.conformance.outcomes import CACHE, FAILED, PASSED, SKIPPED, check
from tests.support.daemon import DaemonProcess

VERSION = "0.1.1"
STATUS = {"pass": PASSED, "fail": FAILED, "skip": SKIPPED}


def test_jevcompat(daemon: DaemonProcess, tmp_path: Path) -> None:
    commands = pypi("jevcompat", f"jevcompat=={VERSION}", cache=CACHE)
    report = tmp_path / "report.json"
    ran = run_suite([commands / "jevcompat", "test", daemon.url, "--timeout", "600", "--json", report], tmp_path)

    assert report.exists(), ran.stdout + ran.stderr
    found = json.loads(report.read_text())
    check("jevcompat", VERSION, {each["id"]: STATUS[each["status"]] for each in found["results"]})
    assert found["summary"]["verdict"] == "conformant"
