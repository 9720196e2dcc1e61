"""Servers of one vision model, each in processes of its own: mlxd, and mlx-vlm's own.

mlx-vlm's server needs packages that mlxd does not install (`benchmarks.fetched`).
"""

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx2

from benchmarks import blas
from benchmarks.engines import free_port
from benchmarks.fetched import MLX_VLM, Unavailable

START_S: Final = 600.0
NAME: Final = "bench"
# Seconds after which a worker's numbers are surely in the metrics.
REPORTED_S: Final = 3.0


@dataclass(slots=True, frozen=True)
class Server:
    """Server under measurement. `model` is its name in requests."""

    name: str
    client: httpx2.AsyncClient
    model: str

    async def encodes(self) -> tuple[float, float] | None:
        """Return the seconds in towers and the encoded media so far, or None if the server does not report them.

        Workers report them at intervals.
        """
        if self.name != "mlxd":
            return None
        await asyncio.sleep(REPORTED_S)
        text = (await self.client.get("/metrics")).text
        names = ("mlxd_media_encode_seconds_total", "mlxd_media_encoded_total")
        rows = [line.rpartition(" ") for line in text.splitlines() if line.startswith(names)]
        seconds, count = (sum(float(value) for name, _, value in rows if name.startswith(wanted)) for wanted in names)
        return seconds, count


@asynccontextmanager
async def mlxd(model: str) -> AsyncGenerator[Server, None]:
    """Start the daemon with one model: a folder, or the name of a model that it has."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="mlxd-") as home:
        config = f'[server]\nport = {port}\n[models.{NAME}]\npath = "{model}"\npreload = true\n'
        await asyncio.to_thread(Path(home, "mlxd.toml").write_text, config)
        command = [sys.executable, "-P", "-m", "gateway.main"]
        async with _running(command, blas.environment() | {"MLXD_HOME": home}, port, "/livez") as client:
            yield Server("mlxd", client, NAME)


@asynccontextmanager
async def mlx_vlm(folder: str) -> AsyncGenerator[Server, None]:
    """Start mlx-vlm's server with its defaults. Raises `Unavailable`."""
    port = free_port()
    env = await asyncio.to_thread(MLX_VLM.environment)
    command = [sys.executable, "-P", "-m", "mlx_vlm.server", "--host", "127.0.0.1", "--port", str(port)]
    async with _running([*command, "--model", folder], env, port, "/health") as client:
        yield Server("mlx_vlm.server", client, folder)


@asynccontextmanager
async def _running(
    command: Sequence[str], env: dict[str, str], port: int, path: str
) -> AsyncGenerator[httpx2.AsyncClient, None]:
    with tempfile.TemporaryFile() as log:
        process = await asyncio.to_thread(
            subprocess.Popen, command, env=env, stdout=log, stderr=log, cwd=tempfile.gettempdir()
        )
        try:
            async with httpx2.AsyncClient(
                base_url=f"http://127.0.0.1:{port}", timeout=START_S, trust_env=False
            ) as client:
                try:
                    await _until_up(client, process, path)
                except Unavailable as error:
                    log.seek(0)
                    raise Unavailable(f"{error}:\n{log.read()[-2000:].decode(errors='replace')}") from error
                yield client
        finally:
            process.terminate()
            await asyncio.to_thread(process.wait, 60)


async def _until_up(client: httpx2.AsyncClient, process: "subprocess.Popen[bytes]", path: str) -> None:
    ends = time.monotonic() + START_S
    while time.monotonic() < ends:
        if process.poll() is not None:
            raise Unavailable(f"the server ended with status {process.returncode}")
        try:
            if (await client.get(path)).status_code == 200:
                return
        except httpx2.TransportError:
            await asyncio.sleep(0.1)
    raise Unavailable("the server did not start")
