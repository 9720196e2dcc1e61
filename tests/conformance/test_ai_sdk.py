"""Vercel's AI SDK: ten cases with each of four providers. The cases are ours, the SDK is theirs."""

import json
from pathlib import Path

from tests.clients.install import npm
from tests.conformance.conftest import run_suite
from tests.conformance.outcomes import CACHE, FAILED, PASSED, check
from tests.support.daemon import DaemonProcess

PACKAGES = ("ai@6.0.326", "@ai-sdk/openai@3.0.141", "@ai-sdk/openai-compatible@2.0.91", "@ai-sdk/anthropic@3.0.139")
SCRIPT = Path(__file__).parent / "scripts" / "ai_sdk.mjs"


def test_ai_sdk(daemon: DaemonProcess, tmp_path: Path) -> None:
    modules = npm("ai-sdk", *PACKAGES, cache=CACHE).parent
    ran = run_suite(["node", SCRIPT, modules, daemon.url], tmp_path)

    assert ran.stdout, ran.stderr
    outcomes = json.loads(ran.stdout.splitlines()[-1])
    check("ai_sdk", " ".join(PACKAGES), {name: FAILED if error else PASSED for name, error in outcomes.items()})
