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

# The installer stops after this time, for example without a network.
INSTALL_S: Final = 300.0


class Unavailable(Exception):
    """The engine cannot run here; the message is the reason."""


class Packages(msgspec.Struct, frozen=True):
    """Packages that one server needs in addition to mlxd's environment, in a folder on the path of this server only.

    `alone` are installed without their dependencies; it also lists those that the server's text endpoints need.
    """

    folder: str
    module: str
    with_dependencies: tuple[str, ...]
    alone: tuple[str, ...]

    def environment(self) -> dict[str, str]:
        """Return variables with which `module` can be imported; install missing packages. Raises `Unavailable`."""
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
    # mlx-audio's dependencies are for speech, which is not measured.
    ("mlx-audio==0.6.2", "miniaudio==1.71", "python-multipart==0.0.34", "websockets==17.4"),
)

VLLM_MLX: Final = Packages(
    "vllm-mlx",
    "vllm_mlx.cli",
    ("fastapi==0.165.0", "prometheus-client==0.26.0"),
    # vllm-mlx requires an older mlx-lm than mlxd, so it gets its own. Its other dependencies are for media and its web
    # page.
    ("vllm-mlx==0.6.0", "mlx-lm==0.31.3"),
)


def imports(module: str, env: dict[str, str]) -> bool:
    """Return whether a process with these variables can import the module."""
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
