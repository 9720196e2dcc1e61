"""Division of a lazily loaded model among ranks, and their agreement on sampled ids.

A rank never reads the parts of other ranks. Rank 0 samples, and all ranks use its ids.
"""

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from protocol.failures import Code
from protocol.group import PIPELINE, indivisible_reason
from worker.errors import LoadFailed, foreign_code


class Agreement:
    """Collective at the end of each step, by which all ranks of `group` use the ids that rank 0 sampled."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._is_lead = group.rank() == 0

    def __call__(self, ids: mx.array) -> mx.array:
        # The zeros of the other ranks depend on their forward passes, so that a rank's earlier collectives come first.
        own = ids if self._is_lead else ids * 0
        agreed: mx.array = mx.distributed.all_sum(own.astype(mx.uint32), group=self._group)
        return agreed


def agreement_of(model: Any) -> Agreement | None:
    """Return the agreement of a model; None if it runs in one process."""
    agreement: Agreement | None = getattr(model, "agreement", None)
    return agreement


class Division:
    """Part of a model that one rank of a group loads."""

    def __init__(self, group: Any, parallel: str) -> None:
        self._group = group
        self.parallel = parallel

    def take(self, model: Any, config: dict[str, Any]) -> None:
        """Reduce a model to this rank's part. Raises `LoadFailed`."""
        if reason := indivisible_reason(config, self.parallel, self._group.size()):
            raise LoadFailed(Code.BAD_CONFIG, reason)
        loaded = _shapes(model)
        with foreign_code(lambda error: self._undivided(config, error)):
            if self.parallel == PIPELINE:
                model.model.pipeline(self._group)
            else:
                model.shard(self._group)
        _check(loaded, _shapes(model))
        model.agreement = Agreement(self._group)

    def _undivided(self, config: dict[str, Any], error: BaseException) -> LoadFailed:
        kind = config.get("model_type")
        message = f"mlx-lm cannot divide '{kind}' as {self.parallel} by {self._group.size()}: {error}"
        return LoadFailed(Code.MODEL_UNSUPPORTED, message)


def _shapes(model: Any) -> dict[str, tuple[int, ...]]:
    flat: Any = tree_flatten(model.parameters())
    return {name: tuple(array.shape) for name, array in flat if isinstance(array, mx.array)}


def _check(loaded: dict[str, tuple[int, ...]], kept: dict[str, tuple[int, ...]]) -> None:
    """Raise `LoadFailed` if a part has an empty tensor, or a tensor that the whole model lacks. The latter belongs to a
    layer that mlx-lm recreated for the part, so its weights are random."""
    unknown = sorted(kept.keys() - loaded.keys())
    if unknown:
        message = f"{len(unknown)} tensors of the divided model are none of its files', such as {unknown[0]}"
        raise LoadFailed(Code.MODEL_UNSUPPORTED, message)
    empty = sorted(name for name, shape in kept.items() if 0 in shape)
    if empty:
        raise LoadFailed(Code.MODEL_UNSUPPORTED, f"nothing of {empty[0]} is left for each rank; use fewer")
