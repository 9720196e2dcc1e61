"""The environment that every measured process is started with, so that all of them compute alike."""

import os
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
CACHE: Final = ROOT / ".cache"
OPENBLAS: Final = CACHE / "openblas" / "lib"


def environment() -> dict[str, str]:
    """Return the environment of a measured process: offline, with the checkout importable, and OpenBLAS preloaded if
    `make openblas` has built it.
    """
    environ = dict(os.environ)
    paths = [str(ROOT), *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))]
    environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    environ["HF_HUB_OFFLINE"] = "1"
    environ["PYTHONUNBUFFERED"] = "1"
    if has_openblas():
        environ["LD_PRELOAD"] = str(OPENBLAS / "libopenblas.so.0")
        environ["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [str(OPENBLAS), environ.get("LD_LIBRARY_PATH")]))
        # Two threads were slower than one at these sizes, and would take the servers' core.
        environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    return environ


def has_openblas() -> bool:
    return sys.platform == "linux" and (OPENBLAS / "libopenblas.so.0").exists()


def describe() -> str:
    """Describe the BLAS library in one phrase for reports."""
    if has_openblas():
        return "OpenBLAS, 1 thread"
    if sys.platform == "linux":
        return "MLX's own BLAS (on a CPU build, `make openblas` is 3 to 30 times faster)"
    return "MLX's own"
