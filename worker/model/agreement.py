"""Agreement of a group's ranks on sampled ids: rank 0 samples, and all ranks use its ids."""

from typing import Any

import mlx.core as mx


class Agreement:
    """Collective at the end of each step of a model that is divided among the ranks of `group`."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._is_lead = group.rank() == 0

    def __call__(self, ids: mx.array) -> mx.array:
        # The other ranks' zeros depend on their forward passes, so that each rank's earlier collectives come first.
        own = ids if self._is_lead else ids * 0
        agreed: mx.array = mx.distributed.all_sum(own.astype(mx.uint32), group=self._group)
        return agreed


def agreement_of(model: Any) -> Agreement | None:
    """Return the agreement of a model; None if it runs in one process."""
    agreement: Agreement | None = getattr(model, "agreement", None)
    return agreement
