"""Capabilities of an engine: concurrent rows, pace, drafts and sparse prefill, from a model and its specification."""

from typing import Final

from protocol.spec import DEFAULT_MAX_RUNNING, WorkerSpec
from worker.engine.forward import can_pack
from worker.engine.scheduling.kept_file import KeptFile
from worker.engine.scheduling.pacer import Pacer
from worker.kv import batched
from worker.kv.quantized import make_caches
from worker.model.batch_mode import BatchMode
from worker.model.device import has_watchdog
from worker.model.loader import LoadedModel
from worker.model.pass_costs import WIDTHS, PassCosts
from worker.sparse.importance import ImportanceReader

# Maximum number of rows that a calibration chooses.
MAX_CALIBRATED_ROWS: Final = 64


def rows_at_once(spec: WorkerSpec, kept: KeptFile | None, mode: BatchMode) -> int:
    """Return the number of rows that may run together, as configured or calibrated."""
    if mode is BatchMode.SINGLE:
        return 1
    if spec.max_running:
        return spec.max_running
    return kept.calibration.max_running if kept is not None and kept.calibration is not None else DEFAULT_MAX_RUNNING


def pacer_of(
    loaded: LoadedModel, spec: WorkerSpec, costs: PassCosts, kept: KeptFile | None, block_tokens: int
) -> Pacer:
    """Return the pacer of a model; a row that generates has up to `block_tokens` tokens in a pass."""
    return Pacer(
        spec,
        costs,
        kept,
        can_fuse=can_pack(loaded.model),
        has_watchdog=has_watchdog(),
        pass_tokens=loaded.pass_tokens,
        block_tokens=block_tokens,
    )


def reader_of(loaded: LoadedModel, spec: WorkerSpec) -> ImportanceReader | None:
    """Return the model that selects tokens for sparse prefill, if it is configured."""
    return ImportanceReader(loaded.draft) if spec.sparse_keep and loaded.draft is not None else None


def speculation_of(loaded: LoadedModel, spec: WorkerSpec) -> tuple[str, bool]:
    """Return a description of speculation's state for people, and whether speculation is on."""
    if spec.speculate == "off":
        return "off", False
    if spec.group is not None:
        return "off, because ranks of a group must take the same steps", False
    if loaded.plan.mode is not BatchMode.TOGETHER:
        return f"off, because rows run in the batch mode {loaded.plan.mode}", False
    if not batched.can_rewind(make_caches(loaded.model)):
        return "off, because the caches of this architecture cannot go back to before a block", False
    rows = spec.max_running or MAX_CALIBRATED_ROWS
    if loaded.pass_tokens and rows * WIDTHS[-1] > loaded.pass_tokens:
        most = loaded.pass_tokens // WIDTHS[-1]
        return f"off, because the experts of a pass compute drafts of at most {most} rows (max_running)", False
    if spec.draft:
        return f"auto, with drafts by {spec.draft}", True
    if loaded.no_head:
        return f"auto, without the checkpoint's head for multi-token prediction: {loaded.no_head}", True
    return "auto", True
