"""Agreement of a group on sampled ids: rank 0 samples, and its ids are those of all ranks."""

from typing import Any

import mlx.core as mx


class Agreement:
    """A collective at the end of each step of a model that is divided among the ranks of `group`."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._is_lead = group.rank() == 0

    def __call__(self, ids: mx.array) -> mx.array:
        # The zero of the others depends on their own forward pass: so each of its collectives comes before this one.
        own = ids if self._is_lead else ids * 0
        agreed: mx.array = mx.distributed.all_sum(own.astype(mx.uint32), group=self._group)
        return agreed


def agreement_of(model: Any) -> Agreement | None:
    """None of a model that runs in one process."""
    agreement: Agreement | None = getattr(model, "agreement", None)
    return agreement
