"""Facts of a load, kept for the next start of a model that generates no text."""

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
    """Write the facts of a load of the model in `path`, if a folder for facts is set. Never raises.

    `libraries` names the packages that compute the model in addition to `_LIBRARIES`.
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
    open_kept(folder, form, spec).write_load(facts)
