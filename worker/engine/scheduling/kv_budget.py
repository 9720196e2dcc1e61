"""The KV budget: memory that rows take, and the limit for it.

A batch is padded to its longest row, so the cost of a set of rows is that of as many rows of the longest.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mlx_lm.models.cache import ChunkedKVCache, RotatingKVCache

from worker.engine.row import Row
from worker.kv.kv import arrays_of, is_sliceable, leaves
from worker.kv.quantized import QuantizedKV
from worker.kv.ragged import STEP, room

# KV grows in steps of this many tokens, in a batch and in mlx-lm's caches of one sequence.
STEP_TOKENS: Final = STEP
# A token's id in the prefix cache.
ID_BYTES: Final = 4
# Longer than any context.
ANY_LENGTH: Final = 2**31 - 1
# Admission counts on this much output; a row that grows further may have to make room for older ones.
RESERVED_OUTPUT: Final = 256


@dataclass(frozen=True, slots=True)
class KvCost:
    """Bytes of KV by sequence length: per token, per token up to a window, and per sequence.

    `widest` are the bytes per token of the layer that has the most, dequantized as attention is given it.
    """

    token_bytes: int
    windows: tuple[tuple[int, int], ...]
    fixed_bytes: int
    widest: int = 0

    @classmethod
    def of(cls, caches: Sequence[Any], tokens: int, drafter_bytes: int = 0) -> "KvCost":
        """Measured on the caches of one sequence of `tokens` tokens; a model that drafts adds so much for each."""
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
        return cls(sum(layers) + drafter_bytes, tuple(windows), fixed_bytes, widest)

    def bytes(self, rows: int, tokens: int) -> int:
        """Of `rows` sequences padded to `tokens` tokens."""
        padded = room(tokens, STEP_TOKENS)
        windows = sum(each * min(padded, size) for each, size in self.windows)
        return rows * (self.token_bytes * padded + windows + self.fixed_bytes)

    def transient(self, rows: int, tokens: int) -> int:
        """Bytes that a join, or growth by a step, takes beside `bytes` for a moment: the KV of all rows is made
        again, layer by layer, and a layer's old KV is freed once its new one exists."""
        return rows * self.widest * room(tokens, STEP_TOKENS)

    def stored(self, tokens: int, checkpoints: int) -> int:
        """Of a prefix in the prefix cache, at most: its tokens' ids and KV, and its checkpoints."""
        windows = sum(each * min(tokens, size * checkpoints) for each, size in self.windows)
        return tokens * (self.token_bytes + ID_BYTES) + windows + checkpoints * self.fixed_bytes

    def storable(self, budget: int) -> int:
        """Tokens of plain KV that a prefix cache of this size has room for."""
        return budget // (self.token_bytes + ID_BYTES)

    def longest(self, budget: int) -> int:
        """The longest sequence that fits `budget` alone, in tokens; `ANY_LENGTH` where nothing grows beyond it."""
        whole = self.fixed_bytes + sum(each * size for each, size in self.windows)
        if not self.token_bytes and (budget >= whole or not self.windows):
            return ANY_LENGTH
        per_token = self.token_bytes or sum(each for each, _ in self.windows)
        fixed = whole if self.token_bytes else self.fixed_bytes
        return max(0, (budget - fixed) // per_token // STEP_TOKENS * STEP_TOKENS)

    def blocks(self, budget: int, size: int) -> int:
        """Blocks of `size` tokens that `budget` has room for; 0 where KV does not grow with the text."""
        return self.longest(budget) // size if self.token_bytes else 0


@dataclass(frozen=True, slots=True)
class KvBudget:
    """Decides who may be in the batch. `spare` is memory for what passes: the room that free buffers have otherwise.

    `step` are the most tokens of a row in one step.
    """

    cost: KvCost
    limit: int
    spare: int = 0
    step: int = 1

    def admits(self, running: Iterable[Row], row: Row, beside: int = 0) -> bool:
        """Whether `row` may join, each row counted with the output it will probably have. Alone, it always may.

        `beside` are bytes of what else is held meanwhile.
        """
        lengths = [self._expected(other) for other in running]
        return not lengths or self._fits(len(lengths) + 1, max(*lengths, self._expected(row)), beside)

    def surplus(self, running: Sequence[Row], beside: int = 0) -> Row | None:
        """The row to take out before the next step, if memory would not last: the least urgent, last admitted one."""
        if len(running) < 2:
            return None
        if self._fits(len(running), max(row.slots for row in running) + self.step, beside):
            return None
        return max(running, key=lambda row: (row.priority, row.stats.admitted, row.arrival))

    def _fits(self, rows: int, tokens: int, beside: int) -> bool:
        passing = max(0, self.cost.transient(rows, tokens) - self.spare)
        return self.cost.bytes(rows, tokens) + passing + beside <= self.limit

    def _expected(self, row: Row) -> int:
        """Tokens of a row at its probable end; at least what the next step needs, so that no row is admitted for
        `surplus` to take it out again."""
        return row.prompt_slots + max(len(row.output) + self.step, min(row.max_tokens, RESERVED_OUTPUT))
