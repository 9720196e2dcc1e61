"""schemathesis, over every operation of the document that a real daemon publishes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.access.key import Key, KeyFile
from tests.support.daemon import ROOT, DaemonProcess
from tests.support.pool import short_home

# `make fuzz` sets it: with it the schemas' boundaries are tried too, and all is repeated until the time is up.
FUZZ_S = os.environ.get("MLXD_FUZZ_S")
SETTINGS = Path(__file__).with_name("schemathesis.toml")
# A name of the model is any text, so that what comes after the name is looked at too.
CONFIG = """\
[server]
port = 0
metrics_auth = false
[models.m]
path = "demo"
context = 256
aliases = ["*"]
"""
SCRIPTED = ("--step-ms=1", "--tokens-per-step=64", "--most-tokens=256")
# A slow machine makes slow examples.
PATIENT = ("--suppress-health-check", "too_slow")
AMOUNT = (
    "--phases",
    "fuzzing,stateful",
    "-n",
    "8",
    "--suppress-health-check",
    "too_slow",
    "--generation-deterministic",
)
LONG = ("--phases", "coverage,fuzzing,stateful", "-n", "100", "--max-time", FUZZ_S or "", *PATIENT)


def fuzz(daemon: DaemonProcess, key: str, *options: str) -> None:
    """Fails with what schemathesis has found and how to see it again."""
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(SETTINGS), "run"]
    command += [f"{daemon.url}/openapi.json", "-H", f"Authorization: Bearer {key}", *options]
    kept = daemon.client.post("/v1/responses", json={"model": "m", "input": "hi", "max_output_tokens": 2}).json()
    # It keeps what it has found where it runs.
    env = os.environ | {"PYTHONPATH": str(ROOT), "MLXD_FUZZ_RESPONSE": kept["id"]}
    done = subprocess.run(command, cwd=daemon.home, env=env, capture_output=True, text=True, check=False)
    log = daemon.home / "logs" / "mlxd.log"
    failed = [line for line in log.read_text().splitlines() if '"level":"error"' in line]
    assert done.returncode == 0, "\n".join([done.stdout[-20_000:], done.stderr, *failed])


@pytest.mark.fuzz
@pytest.mark.parametrize("module", ["tests.support.scripted_daemon", "gateway.main"])
def test_every_answer_is_one_that_the_document_tells_of(module: str) -> None:
    is_scripted = module != "gateway.main"
    with short_home() as home:
        (home / "mlxd.toml").write_text(CONFIG)
        keys = KeyFile(home / "keys" / "keys.json")
        key = keys.create(Key(name="fuzz", prefix="", salt="", hash=""))[1]
        scraper = keys.create(Key(name="scraper", prefix="", salt="", hash="", is_metrics_only=True))[1]
        with DaemonProcess(home, *(SCRIPTED if is_scripted else ()), module=module) as daemon:
            daemon.client.headers["x-api-key"] = key
            fuzz(daemon, key, *(AMOUNT if FUZZ_S is None else LONG))
            metrics = daemon.client.get("/metrics", headers={"x-api-key": scraper}).text

    assert "mlxd_unhandled_errors_total 0.0" in metrics
