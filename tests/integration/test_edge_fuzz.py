"""Clients of every kind, at once, against a daemon with few descriptors: it answers `/livez` throughout.

MLXD_FUZZ_S (`make fuzz` sets it) says how long, MLXD_FUZZ_SEED which clients come first; a failure names its seed.
"""

import asyncio
import os
import socket
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager

import httpx2
import psutil
import pytest

from tests.gateway.telemetry.test_metrics import parsed
from tests.support.daemon import DaemonProcess, write_config
from tests.support.edge import Findings, attack
from tests.support.pool import short_home
from tests.support.scale import patient

pytestmark = pytest.mark.anyio

FUZZ_S = float(os.environ.get("MLXD_FUZZ_S", "0"))
SEED = int(os.environ.get("MLXD_FUZZ_SEED", "0" if not FUZZ_S else str(int(time.time()))))
# In all, where no time is given.
COUNT = 250
AT_ONCE = 24
FILES = 400
# A promise on a machine that is free; the tests share theirs with each other.
LIVEZ_S = 1.0 if FUZZ_S else patient(30)
SETTLE_S = 60
GROWTH_BYTES = 96 << 20
CLIENTS_A_RESTART = 400
SERVER = 'trusted_proxies = ["127.0.0.1"]'


class Watcher:
    """Asks for `/livez` all the time, each on a connection of its own, as a probe does."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.longest_s = 0.0
        self.failures: list[str] = []

    def _run(self) -> None:
        while not self._is_over.wait(0.05):
            began = time.monotonic()
            try:
                with socket.create_connection(("127.0.0.1", self._port), timeout=LIVEZ_S) as probe:
                    probe.sendall(b"GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
                    said = probe.recv(1000)
            except OSError as error:
                said = repr(error).encode()
            took = time.monotonic() - began
            self.longest_s = max(self.longest_s, took)
            if not said.startswith(b"HTTP/1.1 200 ") or took > LIVEZ_S:
                self.failures.append(f"/livez after {took:.2f} s: {said[:200]!r}")

    @contextmanager
    def watching(self) -> Generator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            self._thread.join()


@pytest.mark.fuzz
async def test_a_daemon_with_few_descriptors_outlives_clients_of_every_kind() -> None:
    with short_home() as home:
        write_config(home, ("m", "other"), server=SERVER)
        with DaemonProcess(home, "--step-ms=1", files=FILES) as daemon:
            process = psutil.Process(daemon.process.pid)
            assert daemon.complete(model="m").status_code == 200
            port = int(daemon.url.rpartition(":")[2])
            findings = Findings()
            # What a few of each kind take once is no growth.
            await run(port, daemon, findings, SEED, AT_ONCE)
            before = process.memory_info().rss
            watcher = Watcher(port)
            with watcher.watching():
                count = await run(port, daemon, findings, SEED + 1000, None if FUZZ_S else COUNT)
            print(f"seeds from {SEED + 1000}: {count} clients, /livez within {watcher.longest_s:.2f} s, {findings}")

            assert not findings.problems, "\n".join(findings.problems[:5])
            # None of them was idle for long.
            assert findings.cut_short <= findings.kinds["well_formed"] / 20, findings
            assert not watcher.failures, watcher.failures[:5]
            settled(daemon, process)
            assert process.memory_info().rss - before < GROWTH_BYTES
            assert '"level":"error"' not in (home / "logs" / "mlxd.log").read_text()
            assert daemon.process.poll() is None


async def run(port: int, daemon: DaemonProcess, findings: Findings, seed: int, count: int | None) -> int:
    """Clients until there were `count`, or the time is up. Now and then a worker is restarted."""
    end = time.monotonic() + FUZZ_S
    made = 0

    async def one_after_the_other() -> None:
        nonlocal made
        while made < count if count is not None else time.monotonic() < end:
            made += 1
            if made % CLIENTS_A_RESTART == CLIENTS_A_RESTART // 2:
                await asyncio.to_thread(restart_a_worker, daemon)
            await attack(port, seed + made, findings)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(AT_ONCE):
            tasks.create_task(one_after_the_other())
    return made


def restart_a_worker(daemon: DaemonProcess) -> None:
    """As `mlxctl restart` does: a worker starts and connects amid all that."""
    transport = httpx2.HTTPTransport(uds=str(daemon.home / "run" / "admin.sock"))
    with httpx2.Client(transport=transport, base_url="http://mlxd", timeout=patient(SETTLE_S)) as admin:
        assert admin.post("/v1/models/restart", json={"model": "m"}).status_code == 200


def settled(daemon: DaemonProcess, process: psutil.Process) -> None:
    """Wait until nothing is left of the clients: no request, no connection but ours, no descriptor."""
    end = time.monotonic() + patient(SETTLE_S)
    while True:
        shown = parsed(daemon.client.get("/metrics").text)
        found = (
            shown["mlxd_connections{listener=public}"],
            shown.get("mlxd_num_requests_running{model=m}", 0.0) + shown.get("mlxd_num_requests_waiting{model=m}", 0.0),
            process.num_fds() < 100,
        )
        if found == (1.0, 0.0, True):
            break
        assert time.monotonic() < end, (found, process.num_fds())
        time.sleep(0.1)
    assert shown["mlxd_unhandled_errors_total{}"] == 0
