"""Kept tokens of a prompt: those that a sparse prefill runs, each at its own position.

They are chosen in blocks: a forward pass of the model runs tokens that follow each other, and few of them cost as much
as many.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final

import numpy as np
import numpy.typing as npt

BLOCK: Final = 128
# Always kept: the blocks that a prompt begins and ends with. The first tokens take the attention that nothing else
# needs; the last are what is asked.
HEAD_BLOCKS: Final = 1
TAIL_BLOCKS: Final = 5


class SelectedTokens:
    """Runs `[begin, end)` of a prompt's tokens, in order and apart; the first begins at 0, the last ends the prompt."""

    __slots__ = ("_ahead", "_slots", "count", "runs")

    def __init__(self, runs: Sequence[tuple[int, int]]) -> None:
        self.runs = tuple(runs)
        lengths = [end - begin for begin, end in self.runs]
        self.count = sum(lengths)
        self._slots = [0, *accumulate(lengths[:-1])]
        self._ahead = [begin - slot for (begin, _), slot in zip(self.runs, self._slots, strict=True)]

    @property
    def leading(self) -> int:
        """Tokens before the first gap: their KV is that of the whole prompt."""
        return self.runs[0][1]

    def ahead(self, slot: int) -> int:
        """Positions by which the token in a slot is ahead of it; that of what follows the prompt, too."""
        return self._ahead[bisect_right(self._slots, slot) - 1]

    def segments(self, tokens: npt.NDArray[np.int32], reused: int) -> list[list[int]]:
        """The kept ones of `tokens`, which are the prompt and what was generated, by runs; `reused`, of the leading
        ones, are left out."""
        ends = [end for _, end in self.runs[:-1]]
        runs = zip((begin for begin, _ in self.runs), [*ends, len(tokens)], strict=True)
        parts: list[Any] = [tokens[max(begin, reused) : end].tolist() for begin, end in runs]
        return [part for part in parts if part]


def count_kept(tokens: int, part: float) -> int:
    """Tokens that are kept of a prompt, whichever they are."""
    blocks = math.ceil(tokens / BLOCK)
    return tokens - (blocks - _blocks_kept(blocks, part)) * BLOCK


def choose(importance: npt.NDArray[np.float32], part: float) -> SelectedTokens:
    """Keep the blocks of a prompt whose tokens are the most important on average; of equal ones the first."""
    tokens = len(importance)
    blocks = math.ceil(tokens / BLOCK)
    always = {*range(HEAD_BLOCKS), *range(max(0, blocks - TAIL_BLOCKS), blocks)}
    means = [float(importance[at * BLOCK : (at + 1) * BLOCK].mean()) for at in range(blocks)]
    best = sorted(set(range(blocks)) - always, key=lambda at: (-means[at], at))
    chosen = sorted([*always, *best[: max(0, _blocks_kept(blocks, part) - len(always))]])
    runs: list[tuple[int, int]] = []
    for at in chosen:
        begin, end = at * BLOCK, min(tokens, (at + 1) * BLOCK)
        if runs and runs[-1][1] == begin:
            runs[-1] = runs[-1][0], end
        else:
            runs.append((begin, end))
    return SelectedTokens(runs)


def _blocks_kept(blocks: int, part: float) -> int:
    return min(blocks, max(math.ceil(part * blocks), HEAD_BLOCKS + TAIL_BLOCKS))
