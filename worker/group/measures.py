"""Memory of all ranks: the highest cost and the lowest limits among them."""

from collections.abc import Sequence
from dataclasses import replace

from protocol.group import RankMemory
from worker.engine.scheduling.kv_budget import KvCost
from worker.kv.kv import KvLayout
from worker.model.memory import ShareLimits
from worker.prefix_cache.radix_tree import TokenCost


def measured(rank: int, layout: KvLayout, cost: KvCost, limits: ShareLimits) -> RankMemory:
    # A cached prefix has keys and values for each attention layer, and up to four arrays for a recurrent layer.
    arrays = 2 * (layout.sliceable + layout.windowed) + 4 * layout.stateful
    return RankMemory(
        rank,
        cost.token_bytes,
        cost.windows,
        cost.fixed_bytes,
        cost.widest,
        arrays,
        limits.kv,
        limits.prefixes,
    )


def costliest(ranks: Sequence[RankMemory]) -> KvCost:
    windows = max((each.windows for each in ranks), key=lambda windows: sum(size * count for size, count in windows))
    return KvCost(
        max(each.token_bytes for each in ranks),
        windows,
        max(each.fixed_bytes for each in ranks),
        max(each.widest for each in ranks),
    )


def token_cost(ranks: Sequence[RankMemory]) -> TokenCost | None:
    """Return the cost of cached prefixes; None if that cost is equal on all ranks."""
    costs = {(each.token_bytes, each.windows, each.fixed_bytes) for each in ranks}
    if len(costs) == 1:
        return None
    return TokenCost(
        max(each.token_bytes + sum(size for size, _ in each.windows) for each in ranks),
        max(each.fixed_bytes for each in ranks),
        max(each.arrays for each in ranks),
    )


def tightest(own: ShareLimits, ranks: Sequence[RankMemory]) -> ShareLimits:
    return replace(own, kv=min(each.kv_bytes for each in ranks), prefixes=min(each.prefix_bytes for each in ranks))
