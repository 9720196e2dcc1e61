"""Packages of servers that are compared and that mlxd does not install, fetched once, pinned, into `.cache`."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from benchmarks import blas

# Without a network, an installer gives up after this.
INSTALL_S: Final = 300.0


class Unavailable(Exception):
    """The engine cannot run here; the message says why."""


class Packages(msgspec.Struct, frozen=True):
    """What one server needs beside mlxd's own environment, in a folder that this server alone has on its path.

    `alone` are installed without their dependencies: those that the server's text endpoints need are listed.
    """

    folder: str
    module: str
    with_dependencies: tuple[str, ...]
    alone: tuple[str, ...]

    def environment(self) -> dict[str, str]:
        """Variables with which `module` can be imported; fetches what is missing. Raises `Unavailable`."""
        env = blas.environment()
        if imports(self.module, env):
            return env
        path = blas.CACHE / self.folder
        env["PYTHONPATH"] = os.pathsep.join([str(path), env["PYTHONPATH"]])
        if not imports(self.module, env):
            _install(path, self.with_dependencies)
            _install(path, self.alone, "--no-deps")
            if not imports(self.module, env):
                raise Unavailable(f"{self.module} cannot be imported, also with {path}")
        return env


MLX_VLM: Final = Packages(
    "mlx-vlm-server",
    "mlx_vlm.server",
    ("fastapi==0.165.0",),
    # Of the first, the dependencies are for speech.
    ("mlx-audio==0.6.2", "miniaudio==1.71", "python-multipart==0.0.34", "websockets==17.4"),
)

VLLM_MLX: Final = Packages(
    "vllm-mlx",
    "vllm_mlx.cli",
    ("fastapi==0.165.0", "prometheus-client==0.26.0"),
    # It asks for an mlx-lm older than mlxd's, which it alone gets; media and its web page need the rest.
    ("vllm-mlx==0.6.0", "mlx-lm==0.31.3"),
)


def imports(module: str, env: dict[str, str]) -> bool:
    """Whether a process with these variables can import it."""
    command = [sys.executable, "-P", "-c", f"import {module}"]
    return subprocess.run(command, env=env, capture_output=True, check=False).returncode == 0


def _install(path: Path, packages: Sequence[str], *options: str) -> None:
    uv = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    installer = [uv, "pip", "install", "--python", sys.executable] if uv else [sys.executable, "-m", "pip", "install"]
    print(f"fetching {', '.join(packages)} into {path}", file=sys.stderr, flush=True)
    command = [*installer, "--quiet", "--target", str(path), *options, *packages]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=INSTALL_S)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{', '.join(packages)} could not be fetched within {INSTALL_S:.0f} s") from None
    if done.returncode:
        raise Unavailable(f"{', '.join(packages)} cannot be installed: {done.stderr.strip()[-500:]}")
