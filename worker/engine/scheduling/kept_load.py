"""Facts of a load that a model keeps for its next start, where it generates no text and learns no times of steps."""

import logging
import os
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Final

from protocol.model_digest import digest, files_digest, weights_digest
from protocol.spec import WorkerSpec
from protocol.timing_profile import FOLDER_ENV, LoadFacts
from worker.engine.scheduling.kept_file import open_kept
from worker.model import memory

log = logging.getLogger("mlxd.worker")

_LIBRARIES: Final = ("mlx", "mlx-lm", "mlxd")


def keep_load(spec: WorkerSpec, path: Path, facts: LoadFacts, libraries: Sequence[str] = ()) -> None:
    """Keep what a load of the model in `path` has shown, where such facts are kept. Never in the way of a start.

    `libraries` are those that compute it, beside the usual ones.
    """
    folder = os.environ.get(FOLDER_ENV, "")
    if not folder:
        return
    try:
        weights, configuration = weights_digest(path), files_digest(path, ("config.json",))
    except (OSError, ValueError) as error:
        log.warning("facts of the load are not kept: %s", error)
        return
    versions = [version(name) for name in (*_LIBRARIES, *libraries)]
    form = digest(spec.kind, spec.dtype, memory.has_gpu(), weights, configuration, *versions)
    open_kept(folder, form, spec).loaded(facts)
