"""Prefixes that rows leave in the prefix cache: their places, and their way there."""

from collections.abc import Sequence
from typing import Any, Final

import mlx.core as mx
import numpy as np

from worker.engine.row import Row
from worker.engine.scheduling.kv_budget import KvCost
from worker.prefix_cache.prefix import PrefixCache
from worker.vision.media import media_keys

# Models whose caches cannot be cut get a checkpoint this often within a long message …
CHECKPOINT_TOKENS: Final = 2048
# … and at the newest message boundaries, where the next turn of a chat will leave this one.
NEWEST_BOUNDARIES: Final = 6


class RowPrefixes:
    """Owned by the batch; what it computes runs on the stream of the generator."""

    def __init__(self, cache: PrefixCache, stream: Any) -> None:
        self._cache = cache
        self._stream = stream

    def segments(self, row: Row, tokens: Any, reused: int) -> tuple[list[list[int]], frozenset[int] | None]:
        """The tokens to run, cut where a checkpoint is worth having, and at the edges of media: whatever the size of a
        chunk, it holds tokens of one kind, whose numbers come from the same kernel. Then the ends of segments that are
        worth a checkpoint, if not all are."""
        last = len(tokens) - 1
        cuts: set[int] = set()
        if self._cache.needs_checkpoints:
            messages = [at for at in row.boundaries if reused < at < last]
            chunks = (row.whole(at) for at in range(reused + CHECKPOINT_TOKENS, last, CHECKPOINT_TOKENS))
            cuts = {*messages[:1], *messages[-NEWEST_BOUNDARIES:], *chunks} - {reused}
        if row.kept is not None:
            return row.kept.segments(tokens, reused), None
        marks: frozenset[int] | None = None
        if row.media:
            edges = {at for span in row.media for at in (span.begin, span.end) if reused < at < last}
            # Of many media, only behind the newest: the edges before it are of use to nobody.
            marks = frozenset(
                {*cuts, *([max(edges)] if edges and self._cache.needs_checkpoints else ()), last, last + 1}
            )
            cuts |= edges
        return [part.tolist() for part in np.split(tokens[reused:], [at - reused for at in sorted(cuts)])], marks

    def shareable(self, other: Row, common: int, cost: KvCost | None) -> int:
        """Number of `common` leading tokens that `other` will leave in the cache: all, or up to its last checkpoint, as
        far as there is room."""
        if other.kept is not None:
            return 0
        if not self._cache.needs_checkpoints:
            return min(common, cost.storable(self._cache.budget)) if cost is not None else common
        marks = (*other.boundaries, len(other.prompt) - 1, *range(CHECKPOINT_TOKENS, common + 1, CHECKPOINT_TOKENS))
        cuts = sorted({at for at in marks if at <= common})
        while cuts and cost is not None and cost.stored(cuts[-1], len(cuts)) > self._cache.budget:
            cuts.pop()
        return cuts[-1] if cuts else 0

    def keep(self, row: Row, tokens: Sequence[int], caches: Sequence[Any]) -> None:
        """In memory; nothing of a sparse prompt, whose KV is no other request's."""
        if row.kept is not None:
            return
        with mx.stream(self._stream):
            self._cache.store(media_keys(np.array(tokens, dtype=np.int32), row.media), caches, row.cache_salt)

    def persist(self, row: Row, tokens: Sequence[int]) -> None:
        """To disk: all KV, and the checkpoints that the next turn or a resumed request will ask for."""
        if row.kept is not None:
            return
        starts = row.boundaries or [len(row.prompt) - 1]
        keys = media_keys(np.array(tokens, dtype=np.int32), row.media)
        self._cache.persist(keys, {starts[0], starts[-1], len(tokens)}, row.cache_salt)
