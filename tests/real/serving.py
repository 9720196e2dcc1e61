"""A daemon on folders with real weights, with OpenBLAS where `make openblas` has put it."""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from unittest import mock

import httpx2

from benchmarks import blas
from tests.support.daemon import DaemonProcess
from tests.support.scale import patient

# A long prompt takes a minute of one core, and the machine may be busy.
ANSWER_S: Final = 300


class Served:
    """A daemon and its clients. `restart` starts another daemon in the same home."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._start()

    def _start(self) -> None:
        with mock.patch.dict(os.environ, blas.environment()):
            self.daemon = DaemonProcess(self.home, module="gateway.main").__enter__()
        self.client = httpx2.Client(base_url=self.daemon.url, timeout=patient(ANSWER_S))

    @property
    def url(self) -> str:
        return self.daemon.url

    def restart(self) -> None:
        """Stop the daemon and its workers in order, which writes the prefix cache to disk, and start them again."""
        self.client.close()
        self.daemon.process.terminate()
        self.daemon.wait(60)
        self.daemon.__exit__()
        self._start()

    def close(self) -> None:
        self.client.close()
        self.daemon.__exit__()

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        reply = self.client.post(path, json=dict(body))
        assert reply.status_code == 200, reply.text
        return reply.json()


@contextmanager
def serve(models: Mapping[str, str], server: str = "") -> Iterator[Served]:
    """Serve models by name, each with the lines of its table in mlxd.toml.

    The batch mode is taken unchecked, which saves seconds a load: the tests compare batches themselves.
    """
    tables = "".join(f"[models.{name}]\n{lines}\n" for name, lines in models.items())
    # Short enough for paths of sockets on macOS.
    with tempfile.TemporaryDirectory(prefix="mlxd-", dir="/tmp") as folder:
        home = Path(folder)
        (home / "mlxd.toml").write_text(f"[server]\nport = 0\n{server}\n{tables}")
        served = Served(home)
        try:
            yield served
        finally:
            served.close()
