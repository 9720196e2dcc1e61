"""Servers of one vision model, each in processes of its own: mlxd, and mlx-vlm's own.

mlx-vlm's server needs packages that mlxd does not install. They are fetched once, pinned, into
`.cache/mlx-vlm-server`, which that server alone has on its path; where they can be imported already, none is.
"""

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx

from benchmarks import blas

START_S: Final = 600.0
NAME: Final = "bench"
# After which a worker's numbers are surely in the metrics.
REPORTED_S: Final = 3.0
PACKAGES: Final = blas.CACHE / "mlx-vlm-server"
# What its server imports; of the second, the dependencies are for speech.
_WITH_DEPENDENCIES: Final = ("fastapi==0.165.0",)
_ALONE: Final = ("mlx-audio==0.6.2", "miniaudio==1.71", "python-multipart==0.0.34", "websockets==17.4")


class Unavailable(Exception):
    """A server that cannot run here, with the reason."""


@dataclass(slots=True, frozen=True)
class Server:
    """`model` as its requests say it."""

    name: str
    client: httpx.AsyncClient
    model: str

    async def encodes(self) -> tuple[float, float] | None:
        """Seconds in towers, and media encoded, so far; None of a server that does not tell.

        Workers tell it now and then.
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
    """The daemon with one model: a folder, or the name of one that it has."""
    port = _free_port()
    with tempfile.TemporaryDirectory(prefix="mlxd-") as home:
        config = f'[server]\nport = {port}\n[models.{NAME}]\npath = "{model}"\nbatching = "together"\npreload = true\n'
        await asyncio.to_thread(Path(home, "mlxd.toml").write_text, config)
        command = [sys.executable, "-P", "-m", "gateway.main"]
        async with _running(command, blas.environment() | {"MLXD_HOME": home}, port, "/livez") as client:
            yield Server("mlxd", client, NAME)


@asynccontextmanager
async def mlx_vlm(folder: str) -> AsyncGenerator[Server, None]:
    """mlx-vlm's server with its defaults. Raises `Unavailable`."""
    port = _free_port()
    env = await asyncio.to_thread(_environment)
    command = [sys.executable, "-P", "-m", "mlx_vlm.server", "--host", "127.0.0.1", "--port", str(port)]
    async with _running([*command, "--model", folder], env, port, "/health") as client:
        yield Server("mlx_vlm.server", client, folder)


@asynccontextmanager
async def _running(
    command: Sequence[str], env: dict[str, str], port: int, path: str
) -> AsyncGenerator[httpx.AsyncClient, None]:
    with tempfile.TemporaryFile() as log:
        process = await asyncio.to_thread(
            subprocess.Popen, command, env=env, stdout=log, stderr=log, cwd=tempfile.gettempdir()
        )
        try:
            async with httpx.AsyncClient(
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


async def _until_up(client: httpx.AsyncClient, process: "subprocess.Popen[bytes]", path: str) -> None:
    ends = time.monotonic() + START_S
    while time.monotonic() < ends:
        if process.poll() is not None:
            raise Unavailable(f"the server ended with status {process.returncode}")
        try:
            if (await client.get(path)).status_code == 200:
                return
        except httpx.TransportError:
            await asyncio.sleep(0.1)
    raise Unavailable("the server did not start")


def _environment() -> dict[str, str]:
    """With the packages that mlx-vlm's server imports on its path. Raises `Unavailable`."""
    env = blas.environment()
    if _imports(env):
        return env
    env["PYTHONPATH"] = os.pathsep.join([str(PACKAGES), env["PYTHONPATH"]])
    if not _imports(env):
        _install(_WITH_DEPENDENCIES)
        _install(_ALONE, "--no-deps")
        if not _imports(env):
            raise Unavailable(f"mlx-vlm's server cannot be imported, also with {PACKAGES}")
    return env


def _imports(env: dict[str, str]) -> bool:
    command = [sys.executable, "-P", "-c", "import mlx_vlm.server"]
    return subprocess.run(command, env=env, capture_output=True, check=False).returncode == 0


def _install(packages: Sequence[str], *options: str) -> None:
    uv = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    installer = [uv, "pip", "install", "--python", sys.executable] if uv else [sys.executable, "-m", "pip", "install"]
    print(f"fetching {', '.join(packages)} into {PACKAGES}", file=sys.stderr, flush=True)
    command = [*installer, "--quiet", "--target", str(PACKAGES), *options, *packages]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"{', '.join(packages)} cannot be installed: {done.stderr.strip()[-500:]}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
