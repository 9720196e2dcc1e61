"""Open Responses' compliance tests, with the text model and, for the image, the model with vision."""

import json
import os
from pathlib import Path

from tests.clients.install import git, npm
from tests.conformance.conftest import run_suite
from tests.conformance.outcomes import CACHE, check
from tests.support.daemon import DaemonProcess

COMMIT = "92c12d96d7b61d6d15e2214daa5e9c6000ab6e1c"
# Another place that has the commit, such as a mirror.
SOURCE = os.environ.get("MLXD_OPEN_RESPONSES", "https://github.com/openresponses/openresponses")
PACKAGES = ("bun@1.4.5", "zod@3.25.76")
IMAGE = "image-input"


def test_open_responses(daemon: DaemonProcess, tmp_path: Path) -> None:
    commands = npm("open-responses", *PACKAGES, cache=CACHE)
    # Below the packages, where bun looks for what its modules import.
    suite = git("suite", SOURCE, COMMIT, cache=CACHE / "open-responses")
    outcomes: dict[str, str] = {}
    for model, options in (("demo", []), ("demo-vision", ["--filter", IMAGE])):
        asked = ["--base-url", f"{daemon.url}/v1", "--api-key", "x", "--model", model, "--json", *options]
        ran = run_suite([commands / "bun", "run", suite / "bin" / "compliance-test.ts", *asked], tmp_path)
        assert ran.stdout.startswith("{"), ran.stdout + ran.stderr
        outcomes |= {each["id"]: each["status"] for each in json.loads(ran.stdout)["results"]}
    check("open_responses", COMMIT[:7], outcomes)
