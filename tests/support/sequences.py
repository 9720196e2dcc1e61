"""Sequences of a batch, for tests of its parts."""

from collections.abc import Sequence

from mlx_lm.generate import StopSequences

from worker.engine.load_checks import silent_row
from worker.engine.row import BatchSequence
from worker.sampling.sampler import Draws


def sequence_of(prompt: Sequence[int], max_tokens: int = 8, segments: list[list[int]] | None = None) -> BatchSequence:
    """A greedy sequence of which nothing has run."""
    row = silent_row(1, list(prompt), max_tokens)
    row.sequence = BatchSequence(
        row, segments or [list(prompt)], [], [], Draws(row.sampling), (), StopSequences().matcher()
    )
    return row.sequence
