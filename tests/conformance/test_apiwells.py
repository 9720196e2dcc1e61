"""`apiwells doctor --deep`: what its probes of an OpenAI-compatible endpoint find."""

import json
from pathlib import Path

from tests.clients.install import pypi
from tests.conformance.conftest import run_suite
from tests.conformance.outcomes import CACHE, FAILED, PASSED, check
from tests.support.daemon import DaemonProcess

VERSION = "0.2.3"


def test_apiwells(daemon: DaemonProcess, tmp_path: Path) -> None:
    commands = pypi("apiwells", f"apiwells=={VERSION}", cache=CACHE)
    options = ["--anonymous", "--allow-http", "--deep", "--model", "demo", "--timeout", "300", "--v2-json"]
    ran = run_suite([commands / "apiwells", "doctor", "--base-url", f"{daemon.url}/v1", *options], tmp_path)

    assert ran.stdout, ran.stderr
    probes = json.loads(ran.stdout)["probes"]
    check("apiwells", VERSION, {each["name"]: PASSED if each["status"] == "PASS" else FAILED for each in probes})
