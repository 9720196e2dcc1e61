"""Selected tokens of a prompt, which a sparse prefill runs at their own positions.

Tokens are selected in blocks: a forward pass runs consecutive tokens, and a few of them cost as much as many.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final

import numpy as np
import numpy.typing as npt

BLOCK_TOKENS: Final = 128
# Number of first blocks that are always kept, because the first tokens absorb surplus attention (attention sink).
HEAD_BLOCKS: Final = 1
# Number of last blocks that are always kept, because the last tokens are the question.
TAIL_BLOCKS: Final = 5


class SelectedTokens:
    """Ordered, separate runs `[begin, end)` of a prompt's tokens; the first begins at 0, the last ends the prompt."""

    __slots__ = ("_offsets", "_slots", "count", "runs")

    def __init__(self, runs: Sequence[tuple[int, int]]) -> None:
        self.runs = tuple(runs)
        lengths = [end - begin for begin, end in self.runs]
        self.count = sum(lengths)
        self._slots = [0, *accumulate(lengths[:-1])]
        self._offsets = [begin - slot for (begin, _), slot in zip(self.runs, self._slots, strict=True)]

    @property
    def leading(self) -> int:
        """Number of tokens before the first gap; the KV of these tokens is the same as in a full prefill."""
        return self.runs[0][1]

    def position_offset(self, slot: int) -> int:
        """Return the position of the token in a slot, minus the slot; slots after the prompt are allowed."""
        return self._offsets[bisect_right(self._slots, slot) - 1]

    def segments(self, tokens: npt.NDArray[np.int32], reused: int) -> list[list[int]]:
        """Return the selected tokens of `tokens`, which are prompt and output, by runs; the first `reused` are
        omitted."""
        ends = [end for _, end in self.runs[:-1]]
        runs = zip((begin for begin, _ in self.runs), [*ends, len(tokens)], strict=True)
        parts: list[Any] = [tokens[max(begin, reused) : end].tolist() for begin, end in runs]
        return [part for part in parts if part]


def count_kept(tokens: int, part: float) -> int:
    """Return how many of a prompt's tokens are kept."""
    blocks = math.ceil(tokens / BLOCK_TOKENS)
    return tokens - (blocks - _blocks_kept(blocks, part)) * BLOCK_TOKENS


def choose(importance: npt.NDArray[np.float32], part: float) -> SelectedTokens:
    """Keep the blocks whose tokens have the highest mean importance; earlier blocks come first if several are equal."""
    tokens = len(importance)
    blocks = math.ceil(tokens / BLOCK_TOKENS)
    always = {*range(HEAD_BLOCKS), *range(max(0, blocks - TAIL_BLOCKS), blocks)}
    means = [float(importance[at * BLOCK_TOKENS : (at + 1) * BLOCK_TOKENS].mean()) for at in range(blocks)]
    best = sorted(set(range(blocks)) - always, key=lambda at: (-means[at], at))
    chosen = sorted([*always, *best[: max(0, _blocks_kept(blocks, part) - len(always))]])
    runs: list[tuple[int, int]] = []
    for at in chosen:
        begin, end = at * BLOCK_TOKENS, min(tokens, (at + 1) * BLOCK_TOKENS)
        if runs and runs[-1][1] == begin:
            runs[-1] = runs[-1][0], end
        else:
            runs.append((begin, end))
    return SelectedTokens(runs)


def _blocks_kept(blocks: int, part: float) -> int:
    return min(blocks, max(math.ceil(part * blocks), HEAD_BLOCKS + TAIL_BLOCKS))
