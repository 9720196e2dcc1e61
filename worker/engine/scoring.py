"""Log-probabilities of a prompt's own tokens.

Rows with scored prompts are prefilled one by one and in small slices, because the logits of a whole prompt do not fit
memory. Other prefills compute no logits.
"""

from collections.abc import Collection
from typing import Any, Final

import mlx.core as mx

from worker.engine.forward import ForwardPart, forward
from worker.engine.row import BatchSequence
from worker.engine.sequence_group import SequenceGroup
from worker.kv import batched

SLICE_TOKENS: Final = 64


class ScoredRows:
    """Rows whose prompts are scored, each in its own caches. Owned by the generator."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.rows: list[SequenceGroup] = []

    def add(self, sequence: BatchSequence, *, is_single: bool) -> None:
        """Add a row. With `is_single` the row keeps its own caches, which may have no batch form."""
        caches = sequence.caches if is_single else batched.merge([sequence.caches])
        sequence.caches = []
        self.rows.append(SequenceGroup([sequence], caches))

    def due(self, *, is_alone: bool) -> list[SequenceGroup]:
        """Return the rows whose turn it is: all rows, or only one of them while other rows generate and are delayed by
        it."""
        if is_alone or not self.rows:
            return list(self.rows)
        self.rows = [*self.rows[1:], self.rows[0]]
        return self.rows[-1:]

    def take_complete(self) -> list[SequenceGroup]:
        """Remove and return the rows whose scores are complete and were taken."""
        complete = [rows for rows in self.rows if rows.sequences[0].scores is None]
        self.rows = [rows for rows in self.rows if rows.sequences[0].scores is not None]
        return complete

    def run(self, rows: SequenceGroup, most: int) -> int:
        """Run the next slice of a row. Returns the number of tokens in the slice."""
        sequence = rows.sequences[0]
        assert sequence.scores is not None
        part = sequence.segments[0][: min(most, max(SLICE_TOKENS, sequence.longest_whole))]
        logits = forward(self._model, ForwardPart(rows.sequences, mx.array([part]), rows.caches, [len(part)]))
        for at in range(0, len(part), SLICE_TOKENS):
            sequence.scores.add(logits[0, at : at + SLICE_TOKENS])
        rows.evaluate()
        return len(part)

    def discard(self, sequences: Collection[BatchSequence]) -> None:
        self.rows = [rows for rows in self.rows if rows.sequences[0] not in sequences]
