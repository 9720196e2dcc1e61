"""KV budget: the memory that rows take, and its limit.

A batch is padded to its longest row, so each row costs as much as the longest.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mlx_lm.models.cache import ChunkedKVCache, RotatingKVCache

from worker.engine.row import Row
from worker.kv.quantized import QuantizedKV
from worker.kv.ragged import STEP, room
from worker.kv.spans_and_checkpoints import arrays_of, is_sliceable, leaves
from worker.prefix_cache.cache_and_eviction import MAX_ARRAYS

# Size of a token id in the prefix cache.
ID_BYTES: Final = 4
# This is longer than any context.
UNLIMITED_TOKENS: Final = 2**31 - 1
# Admission reserves KV for this many output tokens; a row that grows further may be preempted for older rows.
RESERVED_OUTPUT_TOKENS: Final = 256
# Number of rows behind one without room that are tried in a step.
TRIES_BEHIND: Final = 64


@dataclass(frozen=True, slots=True)
class KvCost:
    """Bytes of a sequence's KV: per token, per token within each size of window, and independent of the length.

    `widest` is the largest number of bytes per token of any layer, dequantized as for attention. `arrays` is the number
    of a sequence's arrays, whatever their size; 0 if it is not counted, as in a group.
    """

    token_bytes: int
    windows: tuple[tuple[int, int], ...]
    fixed_bytes: int
    widest: int = 0
    arrays: int = 0

    @classmethod
    def of(cls, caches: Sequence[Any], tokens: int, drafter_bytes: int = 0) -> "KvCost":
        """Measure the caches of one sequence of `tokens` tokens; a draft model adds `drafter_bytes` per token."""
        layers, passing, fixed_bytes, windows = list[int](), list[int](), 0, list[tuple[int, int]]()
        for leaf in leaves(caches):
            if is_sliceable(leaf):
                layers.append(leaf.nbytes // tokens)
                passing.append(leaf.whole_bytes // tokens if isinstance(leaf, QuantizedKV) else layers[-1])
            elif isinstance(leaf, RotatingKVCache):
                windows.append((leaf.nbytes // min(tokens, leaf.max_size), leaf.max_size))
            elif isinstance(leaf, ChunkedKVCache):
                windows.append((leaf.nbytes // min(tokens, leaf.chunk_size), leaf.chunk_size))
            else:
                fixed_bytes += sum(array.nbytes for array in arrays_of([], [leaf]))
        widest = max([*passing, *(each for each, _ in windows)], default=0)
        arrays = len(arrays_of([], leaves(caches)))
        return cls(sum(layers) + drafter_bytes, tuple(windows), fixed_bytes, widest, arrays)

    def bytes(self, rows: int, tokens: int) -> int:
        """Return the bytes of `rows` sequences padded to `tokens` tokens."""
        padded = room(tokens, STEP)
        windows = sum(each * min(padded, size) for each, size in self.windows)
        return rows * (self.token_bytes * padded + windows + self.fixed_bytes)

    def transient(self, rows: int, tokens: int) -> int:
        """Return the bytes that are briefly needed in addition to `bytes` when rows join or grow by a step: KV is
        copied layer by layer, and a layer's old KV is freed once the new one exists."""
        return rows * self.widest * room(tokens, STEP)

    def stored(self, tokens: int, checkpoints: int) -> int:
        """Return the maximum bytes of a prefix in the prefix cache: token ids, KV and checkpoints."""
        windows = sum(each * min(tokens, size * checkpoints) for each, size in self.windows)
        return tokens * (self.token_bytes + ID_BYTES) + windows + checkpoints * self.fixed_bytes

    def storable(self, budget: int) -> int:
        """Return the number of tokens whose plain KV fits a prefix cache of `budget` bytes."""
        return budget // (self.token_bytes + ID_BYTES)

    def longest(self, budget: int) -> int:
        """Return the length in tokens of the longest single sequence whose KV fits `budget` bytes; `UNLIMITED_TOKENS`
        if the KV stops growing."""
        whole = self.fixed_bytes + sum(each * size for each, size in self.windows)
        if not self.token_bytes and (budget >= whole or not self.windows):
            return UNLIMITED_TOKENS
        per_token = self.token_bytes or sum(each for each, _ in self.windows)
        fixed = whole if self.token_bytes else self.fixed_bytes
        return max(0, (budget - fixed) // per_token // STEP * STEP)

    def blocks(self, budget: int, size: int) -> int:
        """Return the number of blocks of `size` tokens that fit `budget`; 0 if KV does not grow with the text."""
        return self.longest(budget) // size if self.token_bytes else 0


@dataclass(frozen=True, slots=True)
class KvBudget:
    """Limit of the memory for the rows of a batch, and of the number of their arrays.

    `spare` bytes of free buffers can serve as transient memory; `step` is the maximum number of tokens of a row in one
    step.
    """

    cost: KvCost
    limit: int
    spare: int = 0
    step: int = 1

    def admits(self, running: Iterable[Row], row: Row, extra_bytes: int = 0) -> bool:
        """Whether `row` may join, counting the expected output of each row. An empty batch admits any row.

        `extra_bytes` are counted in addition to the KV of the rows.
        """
        lengths = [self._expected(other) for other in running]
        return not lengths or self._fits(len(lengths) + 1, max(*lengths, self._expected(row)), extra_bytes)

    def surplus(self, running: Sequence[Row], extra_bytes: int = 0) -> Row | None:
        """Return the row to preempt: of the least urgent rows, the last admitted. None if the next step fits, or if
        there is only one row."""
        if len(running) < 2:
            return None
        if self._fits(len(running), max(row.slots for row in running) + self.step, extra_bytes):
            return None
        return max(running, key=lambda row: (row.priority, row.stats.admitted, row.arrival))

    def _fits(self, rows: int, tokens: int, extra_bytes: int) -> bool:
        if rows * self.cost.arrays > MAX_ARRAYS:
            return False
        passing = max(0, self.cost.transient(rows, tokens) - self.spare)
        return self.cost.bytes(rows, tokens) + passing + extra_bytes <= self.limit

    def _expected(self, row: Row) -> int:
        """Return the expected number of tokens of a row at its end, but at least the number that it has after the next
        step, so that a row is not preempted right after it is admitted."""
        return row.prompt_slots + max(len(row.output) + self.step, min(row.max_tokens, RESERVED_OUTPUT_TOKENS))


@dataclass(slots=True)
class AdmissionPass:
    """One pass over the waiting rows in their order, which finds those that have room beside the running rows.

    `needs` returns the bytes that a row needs in addition to its KV. `short` is the first row without room, and `tries`
    is the number of rows that are still to be tried.
    """

    budget: KvBudget
    needs: Callable[[Row], int]
    short: Row | None = None
    tries: int = TRIES_BEHIND

    def admits(self, running: Sequence[Row], row: Row, *, yields: bool = False) -> bool:
        """Whether the next row may run. If it `yields` to others, as do all rows after it, the pass is over."""
        if yields:
            self.tries = 0
            return False
        if self.short is not None:
            self.tries -= 1
        if self.budget.admits(running, row, self.needs(row)) and self._may_pass(running, row):
            return True
        self.short = self.short or row
        return False

    def _may_pass(self, running: Sequence[Row], row: Row) -> bool:
        """Whether a row may run before `short`.

        It may if its tenant has fewer running rows: the tenant of `short` has its turn already. It also may if `short`
        has room beside it and all rows that came after `short`. So rows that keep coming do not starve a large one.
        """
        short = self.short
        if short is None or row.priority > short.priority:
            return short is None
        tenants = Counter(each.tenant for each in running)
        if tenants[row.tenant] < tenants[short.tenant]:
            return True
        later = [each for each in running if each.arrival > short.arrival]
        return self.budget.admits([row, *later], short, self.needs(short))
