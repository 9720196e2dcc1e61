"""Prefixes of rows in the prefix cache: where they are cut, and how they are stored."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, Final

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generation_stream

from worker.engine.row import BatchSequence, Row
from worker.engine.scheduling.kv_budget import KvCost
from worker.prefix_cache.prefix import PrefixCache
from worker.prefix_cache.radix_tree import common_prefix
from worker.vision.media import media_keys

# Models whose caches cannot be cut get checkpoints at this distance within a long message.
CHECKPOINT_TOKENS: Final = 2048
# Number of newest message boundaries that get a checkpoint, besides the first boundary: the next turn of a chat
# branches off at one of them.
MAX_BOUNDARY_CHECKPOINTS: Final = 6
# Waiting for another row's prefill pays off if the common prefix has at least about this many tokens.
MIN_SHARED_TOKENS: Final = 64


class RowPrefixes:
    """Writer of rows' prefixes, owned by the batch."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache

    def segments(self, row: Row, tokens: Any, reused: int) -> tuple[list[list[int]], frozenset[int] | None]:
        """Return the tokens to run, in segments, and the ends of segments that get a checkpoint; None means that all
        segments do.

        Segments are cut at checkpoints and at the edges of media, so that each chunk has tokens of only one kind, and
        the same kernel computes them whatever the chunk size is.
        """
        if row.questions is not None:
            return row.questions.segments(tokens.tolist(), reused)
        last = len(tokens) - 1
        cuts: set[int] = set()
        if self._cache.needs_checkpoints:
            messages = [at for at in row.boundaries if reused < at < last]
            chunks = (row.whole(at) for at in range(reused + CHECKPOINT_TOKENS, last, CHECKPOINT_TOKENS))
            cuts = {*messages[:1], *messages[-MAX_BOUNDARY_CHECKPOINTS:], *chunks} - {reused}
        if row.kept is not None:
            return row.kept.segments(tokens, reused), None
        marks: frozenset[int] | None = None
        if row.media:
            edges = {at for span in row.media for at in (span.begin, span.end) if reused < at < last}
            # A checkpoint is only worthwhile at the last edge of media, not at the others.
            marks = frozenset(
                {*cuts, *([max(edges)] if edges and self._cache.needs_checkpoints else ()), last, last + 1}
            )
            cuts |= edges
        return [part.tolist() for part in np.split(tokens[reused:], [at - reused for at in sorted(cuts)])], marks

    def must_wait(self, row: Row, prefilling: Sequence[BatchSequence], cost: KvCost | None) -> bool:
        """Whether one of the sequences in prefill is still within a prefix that it shares with the row, and that
        is much longer than what the cache holds. The wait is never longer than the prefill of that prefix.
        """
        row.awaited = None
        if not prefilling or not self._cache.is_on:
            return False
        tokens = row.reusable
        head = tokens[:MIN_SHARED_TOKENS]
        cached: int | None = None
        for sequence in prefilling:
            other = sequence.row
            # Rows that are computed one by one are slow, so only their like wait for them.
            is_slow = sequence.scores is not None or (sequence.is_alone and row.questions is None)
            if is_slow or other.cache_salt != row.cache_salt or not _begins_with(other, head):
                continue
            gain = self._shareable(sequence, row.whole(common_prefix(other.keys(), tokens)), cost)
            if gain < MIN_SHARED_TOKENS or sequence.prefilled >= gain:
                continue
            cached = self._cache.longest(tokens, row.cache_salt) if cached is None else cached
            if gain - cached >= MIN_SHARED_TOKENS:
                row.awaited = other, gain
                return True
        return False

    def missing(self, tokens: Any, salt: str, running: Sequence[BatchSequence]) -> Iterator[tuple[BatchSequence, int]]:
        """Yield the running sequences that have computed a prefix of these tokens which the cache lacks, and the length
        of that prefix.
        """
        if not running or not self._cache.is_on:
            return
        head = tokens[:MIN_SHARED_TOKENS]
        for sequence in running:
            other = sequence.row
            if other.cache_salt != salt or not _begins_with(other, head):
                continue
            common = min(common_prefix(other.keys(), tokens), sequence.prefilled)
            if common - self._cache.longest(tokens, salt) >= MIN_SHARED_TOKENS:
                yield sequence, common

    def _shareable(self, sequence: BatchSequence, common: int, cost: KvCost | None) -> int:
        """Return how many of the `common` leading tokens a sequence in prefill can leave in the cache. With
        checkpoints, these are the tokens up to the last one that is not taken yet and that fits the cache's budget."""
        if sequence.row.kept is not None:
            return 0
        if not self._cache.needs_checkpoints:
            return min(common, cost.storable(self._cache.budget)) if cost is not None else common
        ends = accumulate(map(len, sequence.segments), initial=sequence.prefilled)
        marks = sequence.marks
        cuts = [at for at in ends if sequence.prefilled < at <= common and (marks is None or at in marks)]
        while cuts and cost is not None and cost.stored(cuts[-1], len(cuts)) > self._cache.budget:
            cuts.pop()
        return cuts[-1] if cuts else 0

    def keep(self, row: Row, tokens: Sequence[int], caches: Sequence[Any]) -> None:
        """Store a prefix in memory. KV of a sparse prompt is not stored, because no other request can use it."""
        if row.kept is not None:
            return
        with mx.stream(generation_stream):
            keys = media_keys(np.array(tokens, dtype=np.int32), row.media)
            self._cache.store(keys, caches, row.cache_salt, row.rid)

    def persist(self, row: Row, tokens: Sequence[int]) -> None:
        """Write a prefix to disk, with the checkpoints that the next turn or a resumed request will need."""
        if row.kept is not None:
            return
        starts = row.boundaries or [len(row.prompt) - 1]
        keys = media_keys(np.array(tokens, dtype=np.int32), row.media)
        self._cache.persist(keys, {starts[0], starts[-1], len(tokens)}, row.cache_salt)


def _begins_with(row: Row, head: Any) -> bool:
    return np.array_equal(row.keys()[: len(head)], head)
