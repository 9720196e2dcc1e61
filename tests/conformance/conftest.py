"""Daemons for other people's suites: the models that ship, with greedy answers."""

import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.clients.install import node_path
from tests.support.daemon import DaemonProcess
from tests.support.scale import patient

SUITE_TIMEOUT_S = patient(900)
CONFIG = """
[server]
port = 0
{server}
[models.demo]
path = "demo"
aliases = ["{alias}"]
sampling = {{ temperature = 0.0{sampling} }}
[models.demo-vision]
path = "demo-vision"
sampling = {{ temperature = 0.0 }}
"""


@pytest.fixture(scope="session")
def daemon() -> Iterator[DaemonProcess]:
    with _started() as started:
        yield started


@pytest.fixture(scope="session")
def lenient_daemon() -> Iterator[DaemonProcess]:
    """A daemon that answers requests for any model and for none, and bounds answers that have no limit."""
    with _started('default = "demo"', "*", ", max_tokens = 24") as started:
        yield started


@contextmanager
def _started(server: str = "", alias: str = "default", sampling: str = "") -> Iterator[DaemonProcess]:
    with tempfile.TemporaryDirectory(prefix="mlxd-", dir="/tmp") as folder:
        home = Path(folder)
        (home / "mlxd.toml").write_text(CONFIG.format(server=server, alias=alias, sampling=sampling))
        with DaemonProcess(home, module="gateway.main") as started:
            yield started


def run_suite(
    command: Sequence[str | Path], folder: Path, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a suite, whose exit status says nothing that its report does not. It inherits nothing but the PATH."""
    clean = {"PATH": node_path(), "HOME": str(folder), "LANG": "C.UTF-8", "CI": "1", "NO_COLOR": "1"}
    proxies = {name: os.environ[name] for name in ("http_proxy", "https_proxy", "no_proxy") if name in os.environ}
    return subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=clean | proxies | dict(env or {}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SUITE_TIMEOUT_S,
    )
